"""One engine of one rank in a process of its own, to be killed, stopped and asked from the outside."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Decline, Named
from kvxfer.protocol.values import Ended, Event, Released
from kvxfer.values import BlockTable, Fetch, Offer
from tests.control.caches import HEADS, LAYERS, TOKENS, UNIT, make_cache

__all__ = ["ALONE", "DRAIN_S", "Node", "name"]

_spawn = mp.get_context("spawn")

DRAIN_S = 3.0
"""How long a node that gets SIGTERM lets others fetch what it offers."""

ALONE = {"listen": "127.0.0.2"}
"""Settings of a node whose port is to be taken again: where no other process is given it meanwhile."""


def name(i: int | str) -> TransferId:
    return TransferId(f"own/1/{i}", 0)


class NodeEngine:
    """What runs in the process: an agent, a directory, and memory filled from a seed (0: with zeros)."""

    def __init__(self, backend: str, options: dict[str, Any], port: int, blocks: int, seed: int, config: Any) -> None:
        settings = Config.from_mapping({"backend": backend, "backend_options": options, **config})
        size = len(LAYERS) * blocks * HEADS * TOKENS * UNIT
        rng = np.random.default_rng(seed)
        self.memory = rng.integers(1, 255, size, dtype=np.uint8) if seed else np.zeros(size, np.uint8)
        self.agent = Agent(make_cache(self.memory, 1, 0, blocks), settings, f"node-{seed}")
        self.directory = Directory(msgspec.structs.replace(settings, port=port), "node", epoch=self.agent.epoch)
        self.directory.publish((self.agent.descriptor,))
        self.drain_s = DRAIN_S

    def offer(self, transfer: TransferId, blocks: list[int], tokens: int, generation: int, final: bool) -> None:
        self.agent.offer(Offer(transfer, b"d", generation, tokens, BlockTable.of([blocks]), final))

    def fetch(
        self, transfer: TransferId, source: Source, blocks: list[int], tokens: int, offered: bool = False
    ) -> None:
        table = BlockTable.of([blocks])
        self.agent.fetch(Fetch(str(transfer), transfer, b"d", source, table, 0, tokens, offered=offered))

    def several(self, calls: list[tuple[Any, ...]]) -> None:
        """Calls of these methods, each with its name first, in one go."""
        for method, *arguments in calls:
            getattr(self, method)(*arguments)

    def events(self) -> list[Event]:
        return self.agent.events()

    def publish_at(self, address: str) -> None:
        """Let the directory name another address for the agent: that of a relay in between."""
        rank = type(self.agent.descriptor)(address, self.agent.epoch, self.agent.cache, self.agent.descriptor.backends)
        self.directory.publish((rank,))

    def address(self) -> str:
        return self.agent.descriptor.address

    def source(self) -> Source:
        return self.directory.source

    def blocks(self, which: list[int]) -> bytes:
        return self.memory.reshape(len(LAYERS), -1, HEADS, TOKENS, UNIT)[:, which].tobytes()

    def scribble(self, which: list[int]) -> None:
        """Somebody else uses these blocks now."""
        self.memory.reshape(len(LAYERS), -1, HEADS, TOKENS, UNIT)[:, which] = 0xEE

    def settle(self, source: Source, transfer: TransferId) -> None:
        """Tell an engine that a transfer will not be fetched."""
        self.directory.tell(source, Decline(source.epoch, (Named(transfer, b"d"),), "not wanted"))

    def notices(self) -> list[TransferId]:
        """What other engines have told this one of, since the last call."""
        return [n.transfer for notice in self.directory.notices() for n in getattr(notice, "transfers", ())]

    def vitals(self) -> tuple[int, int]:
        """Threads and file descriptors."""
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def holds(self) -> tuple[int, int]:
        """Fetches and offers in hand."""
        stats = self.agent.stats()
        return stats.fetches, stats.offers

    def close(self) -> None:
        self.agent.close()
        self.directory.close()

    def drains(self, seconds: float) -> None:
        """Let others fetch what it offers for so long after SIGTERM."""
        self.drain_s = seconds

    def drain(self) -> None:
        self.agent.drain(self.drain_s)
        self.directory.close()


def _serve(pipe: Connection, args: tuple[Any, ...]) -> None:
    try:
        engine = NodeEngine(*args)

        def stop(number: int, frame: Any) -> None:
            engine.drain()
            os._exit(0)

        signal.signal(signal.SIGTERM, stop)  # as an engine does that is to be replaced
        pipe.send((True, engine.source()))
        while True:
            method, arguments = pipe.recv()
            pipe.send((True, getattr(engine, method)(*arguments)))
            if method == "close":
                return
    except EOFError:
        return
    except Exception as e:
        pipe.send((False, e))


class Node:
    """The handle. Methods that ``NodeEngine`` has are called there, half a minute at most."""

    def __init__(
        self,
        backend: str = "zmq",
        *,
        seed: int = 0,
        port: int = 0,
        blocks: int = 64,
        options: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        config = {"transfer_timeout": 6.0, "lease": 5.0, "peer_timeout": 2.0, "staging_bytes": 1 << 20, **config}
        config.setdefault("abort_timeout", config["peer_timeout"])
        self._pipe, theirs = _spawn.Pipe()
        args = (backend, options or {}, port, blocks, seed, config)
        self.process = _spawn.Process(target=_serve, args=(theirs, args), daemon=True)
        self.process.start()
        theirs.close()
        self.seen: list[Event] = []
        self.source: Source = self._answer(60.0)

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            self._pipe.send((method, arguments))
            return self._answer(30.0)

        return call

    def _answer(self, timeout: float) -> Any:
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"node {self.process.pid} does not answer")
        good, answer = self._pipe.recv()
        if not good:
            raise answer
        return answer

    def wait(self, sort: type, count: int = 1, timeout: float = 30.0, **fields: Any) -> list[Any]:
        """The first ``count`` events of a sort with these fields."""
        end = time.monotonic() + timeout
        while True:
            self.seen += self.events()
            found = [e for e in self.seen if isinstance(e, sort) and all(getattr(e, k) == v for k, v in fields.items())]
            if len(found) >= count:
                return found
            if time.monotonic() > end:
                raise AssertionError(f"{count} x {sort.__name__} {fields} did not come within {timeout} s: {self.seen}")
            time.sleep(0.01)

    def settled(self, transfer: TransferId, timeout: float = 30.0) -> Ended:
        """The outcome of a transfer, once it is released too."""
        (end, *more) = self.wait(Ended, transfer=transfer, timeout=timeout)
        assert not more, f"more than one outcome: {end}, {more}"
        self.wait(Released, transfer=transfer, timeout=timeout)
        return end

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        os.kill(self.process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)  # type: ignore[arg-type]

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self._pipe.close()
