"""Agents over caches in this process, on the in-process fake back end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.clock import SetForward
from kvxfer.testing.engine import AgentEngine, PagedMemory, until
from kvxfer.values import BlockTable, Fetch, Offer


class SeededEngine(AgentEngine):
    """One engine of several ranks with a directory."""

    def block(self, block: int, rank: int = 0) -> np.ndarray:
        """The bytes of one block in all layers, ``[layers, heads, tokens, unit]``."""
        return self.memory.arrays[rank][:, block]


@pytest.fixture
def clock() -> Iterator[SetForward]:
    """Is the clock of this process, which the test sets forward."""
    made = SetForward()
    with made.installed():
        yield made


@pytest.fixture
def engine() -> Iterator[Callable[..., SeededEngine]]:
    """Makes engines; closes them at the end."""
    made: list[SeededEngine] = []

    def make(
        options: dict[str, Any],
        *,
        tp: int = 1,
        blocks: int = 16,
        seed: int | None = None,
        facts: dict[str, str] | None = None,
        unit: int = 16,
        **config: Any,
    ) -> SeededEngine:
        config = {"transfer_timeout": 30.0, "lease": 30.0, "peer_timeout": 20.0, "staging_bytes": 1 << 20, **config}
        config.setdefault("abort_timeout", min(config["peer_timeout"], 2.0))
        backend = options.pop("backend", "kvxfer.testing.fake:FakeTransport")
        memory = PagedMemory(blocks=blocks, ranks=tp, seed=seed, unit=unit)
        made.append(
            SeededEngine(
                {"backend_options": options, "backend": backend, **config},
                memory,
                name=f"engine{len(made)}",
                facts=facts,
            )
        )
        return made[-1]

    yield make
    for e in made:
        e.close()


def meet(d: SeededEngine, p: SeededEngine) -> None:
    """Have the first rank of D make its links with P, so that a load need not do that within its time."""
    d.agents[0].prepare(p.source)
    until(lambda: any(link.up for link in d.agents[0].links()))


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


_loads = count()


def works(p: SeededEngine, d: SeededEngine) -> Ended:
    """A load of a block is delivered, and right."""
    transfer = TransferId("own/1/works", next(_loads))
    p.agents[0].offer(offered([3], 4, transfer=transfer))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=transfer, handle=str(transfer)))
    end = d.over(str(transfer))
    assert end.outcome.delivered, end
    assert np.array_equal(d.block(5), p.block(3))
    return end


__all__ = ["Ended", "SeededEngine", "FailureKind", "Released", "fetch", "meet", "offered", "until", "works"]
