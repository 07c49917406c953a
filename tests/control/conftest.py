"""Agents over caches in this process, on the in-process fake back end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Ended, Event, Released
from kvxfer.values import BlockTable, Fetch, Offer
from tests.control import caches
from tests.control.caches import HEADS, LAYERS, TOKENS, make_cache


@dataclass
class Engine:
    """One engine of ``tp`` ranks with a directory, over numpy memory filled with ``fill``."""

    agents: list[Agent]
    directory: Directory
    memories: list[np.ndarray]
    seen: dict[int, list[Event]] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        return self.directory.source

    def events(self, rank: int = 0) -> list[Event]:
        self.seen.setdefault(rank, []).extend(self.agents[rank].events())
        return self.seen[rank]

    def wait(self, sort: type, rank: int = 0, count: int = 1, timeout: float = 10.0) -> list[Any]:
        """The first ``count`` events of a sort."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            found = [e for e in self.events(rank) if isinstance(e, sort)]
            if len(found) >= count:
                return found
            time.sleep(0.002)
        raise AssertionError(f"{count} x {sort.__name__} did not come within {timeout} s: {self.events(rank)}")

    def over(self, handle: str, timeout: float = 10.0) -> Ended:
        """How a fetch has ended, once its blocks can be filled again."""
        until(lambda: any(isinstance(e, Released) and e.handle == handle for e in self.events()), timeout)
        (end,) = (e for e in self.events() if isinstance(e, Ended) and e.handle == handle)
        return end

    def block(self, block: int, rank: int = 0) -> np.ndarray:
        """The bytes of one block in all layers, ``[layers, heads, tokens, unit]``."""
        view = self.memories[rank].reshape(len(LAYERS), -1, HEADS // len(self.agents), TOKENS, caches.UNIT)
        return view[:, block]

    def close(self) -> None:
        for a in self.agents:
            a.close()
        self.directory.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Makes engines; closes them at the end."""
    made: list[Engine] = []

    def make(
        options: dict[str, Any],
        *,
        tp: int = 1,
        blocks: int = 16,
        seed: int | None = None,
        facts: dict[str, str] | None = None,
        **config: Any,
    ) -> Engine:
        config = {"transfer_timeout": 5.0, "lease": 5.0, "peer_timeout": 2.0, "staging_bytes": 1 << 20, **config}
        backend = options.pop("backend", "kvxfer.testing.fake:FakeTransport")
        settings = Config.from_mapping({"backend": backend, "backend_options": options, **config})
        rng = np.random.default_rng(seed)
        size = len(LAYERS) * blocks * HEADS * TOKENS * caches.UNIT // tp
        memories = [
            np.zeros(size, np.uint8) if seed is None else rng.integers(1, 255, size, dtype=np.uint8) for _ in range(tp)
        ]
        name = f"engine{len(made)}"
        agents = [Agent(make_cache(m, tp, r, blocks), settings, name, facts) for r, m in enumerate(memories)]
        directory = Directory(settings, name, facts, epoch=agents[0].epoch)
        directory.publish(tuple(a.descriptor for a in agents))
        made.append(Engine(agents, directory, memories))
        return made[-1]

    yield make
    for e in made:
        e.close()


def offered(
    blocks: list[int],
    tokens: int,
    *,
    transfer: TransferId,
    digest: bytes = b"d",
    generation: int = 1,
    final: bool = True,
) -> Offer:
    return Offer(transfer, digest, generation, tokens, BlockTable.of([blocks]), final)


def fetch(
    source: Source,
    blocks: list[int],
    tokens: int,
    *,
    transfer: TransferId,
    digest: bytes = b"d",
    start: int = 0,
    own: Source | None = None,
    handle: str = "req",
) -> Fetch:
    return Fetch(handle, transfer, digest, source, BlockTable.of([blocks]), start, tokens, own)


def until(true: Callable[[], bool], timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, f"not so within {timeout} s"
        time.sleep(0.01)


__all__ = ["Ended", "Engine", "FailureKind", "Released", "fetch", "make_cache", "offered", "until"]
