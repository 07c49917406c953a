"""One engine of one rank in a process of its own, to be killed, stopped and asked from the outside."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Decline, Named
from kvxfer.testing.engine import AgentEngine, PagedMemory
from kvxfer.testing.remote import Remote
from kvxfer.values import BlockTable, Fetch, Offer

__all__ = ["ALONE", "DRAIN_S", "Node", "name", "nodes"]

DRAIN_S = 3.0
"""How long a node that gets SIGTERM lets others fetch what it offers."""

ALONE = {"listen": "127.0.0.2"}
"""Settings of a node whose port is to be taken again: where no other process is given it meanwhile."""


def name(i: int | str) -> TransferId:
    return TransferId(f"own/1/{i}", 0)


class NodeEngine(AgentEngine):
    """What runs in the process, with memory filled from a seed (0: with zeros)."""

    def __init__(self, backend: str, blocks: int = 16, seed: int = 0, **config: Any) -> None:
        settings = Config.from_mapping({"backend": backend, **config})
        super().__init__(settings, PagedMemory(blocks=blocks, seed=seed or None), name=f"node-{seed}")
        self.drain_s = DRAIN_S

    def offer(self, transfer: TransferId, blocks: list[int], tokens: int, generation: int, final: bool) -> None:
        self.agents[0].offer(Offer(transfer, b"d", generation, tokens, BlockTable.of([blocks]), final))

    def fetch(
        self, transfer: TransferId, source: Source, blocks: list[int], tokens: int, offered: bool = False
    ) -> None:
        table = BlockTable.of([blocks])
        self.agents[0].fetch(Fetch(str(transfer), transfer, b"d", source, table, 0, tokens, offered=offered))

    def several(self, calls: list[tuple[Any, ...]]) -> None:
        """Calls of these methods, each with its name first, in one go."""
        for method, *arguments in calls:
            getattr(self, method)(*arguments)

    def drains(self, seconds: float) -> None:
        """Let others fetch what it offers for so long after SIGTERM."""
        self.drain_s = seconds

    def forget(self) -> None:
        """Forget the events so far."""
        self.events(), self.seen.clear()

    def publish_at(self, address: str) -> None:
        """Let the directory name another address for the agent: that of a relay in between."""
        self.directory.publish((replace(self.agents[0].descriptor, address=address),))

    def address(self) -> str:
        return self.agents[0].descriptor.address

    def blocks(self, which: list[int]) -> bytes:
        return self.memory.read(which).tobytes()

    def scribble(self, which: list[int]) -> None:
        """Somebody else uses these blocks now."""
        self.memory.write(which, 0xEE)

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
        stats = self.agents[0].stats()
        return stats.fetches, stats.offers


def _serve(settings: dict[str, Any]) -> NodeEngine:
    engine = NodeEngine(**settings)

    def stop(number: int, frame: Any) -> None:
        engine.agents[0].drain(engine.drain_s)
        engine.directory.close()
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)  # as an engine does that is to be replaced
    return engine


class Node:
    """The handle. Methods that ``NodeEngine`` has are called there."""

    def __init__(self, backend: str = "zmq", **config: Any) -> None:
        config = {"transfer_timeout": 30.0, "lease": 30.0, "peer_timeout": 20.0, "staging_bytes": 1 << 20, **config}
        config = {"blocks": 64, "abort_timeout": min(2.0, config["peer_timeout"]), **config}
        self._engine = Remote("node", _serve, {"backend": backend, **config})
        self.process, self.kill = self._engine.process, self._engine.kill
        self.source: Source = self._engine("source")

    def __getattr__(self, method: str) -> Any:
        return partial(self._engine, method)

    def settled(self, transfer: TransferId, timeout: float = 60.0) -> Any:
        """The outcome of a transfer, once it is released too."""
        return self.over(str(transfer), timeout)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self._engine.stop()
        try:
            yield
        finally:
            self._engine.resume()


@contextmanager
def nodes(backend: str = "zmq", **settings: Any) -> Iterator[Callable[..., Node]]:
    """Yield what makes nodes, with these settings if no others are given; end them all."""
    made: list[Node] = []

    def make(backend: str = backend, **more: Any) -> Node:
        made.append(Node(backend, **(settings | more)))
        return made[-1]

    try:
        yield make
    finally:
        for node in made:
            node.kill()
