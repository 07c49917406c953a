"""How fast a link is taken to be whose back end lets through so many bytes in a second, one batch after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.identity import TransferId
from kvxfer.protocol import pace, parts
from kvxfer.protocol.values import Released
from kvxfer.values import BlockTable, Fetch
from tests.control.conftest import SeededEngine, offered

BLOCKS, PART_S, TRIES = 64, 0.2, 20
INNER = {
    "read": ({"inner": "tcp"}, 64),
    "sent, staged": ({"inner": "zmq"}, 16),
    "written": ({"inner": "kvxfer.testing.fake:FakeTransport", "inner_options": {"verbs": ["write"]}}, 1024),
}


@pytest.mark.parametrize("together", [1, 4], ids=["alone", "four together"])
@pytest.mark.parametrize(("inner", "unit"), INNER.values(), ids=INNER)
def test_the_pace_of_a_throttled_link_is_learnt_within_a_tenth(
    engine: Callable[..., SeededEngine],
    monkeypatch: pytest.MonkeyPatch,
    inner: dict[str, Any],
    unit: int,
    together: int,
) -> None:
    """Where this host was busy, so that bytes waited for us or we for them, it is tried again."""
    monkeypatch.setattr(pace, "MIN_BYTES", 1)
    nbytes = BLOCKS * 3 * 4 * 4 * unit
    capacity = nbytes / PART_S
    monkeypatch.setattr(
        parts, "HOST_BYTES", nbytes // 16
    )  # so that what is together takes turns, and none of it is ever alone
    slow = {"backend": "kvxfer.testing.faults:Faulty", "bytes_per_s": capacity, **inner}
    config = {"blocks": together * BLOCKS, "transfer_timeout": 20.0, "lease": 20.0, "peer_timeout": 10.0, "unit": unit}
    p, d = engine(dict(slow), seed=1, **config), engine(dict(slow), **config)
    tables = [[*range(i * BLOCKS, (i + 1) * BLOCKS)] for i in range(together)]
    learnt = 0.0
    for turn in range(TRIES):
        for i, blocks in enumerate(tables):
            transfer = TransferId(f"own/1/{turn}-{i}", 0)
            p.agents[0].offer(offered(blocks, 4 * BLOCKS, transfer=transfer))
            d.agents[0].fetch(Fetch(f"{turn}-{i}", transfer, b"d", p.source, BlockTable.of([blocks]), 0, 4 * BLOCKS))
        d.wait(Released, count=(turn + 1) * together)
        [told] = [link.bytes_per_s for agent in (*p.agents, *d.agents) for link in agent.links() if link.bytes_per_s]
        learnt = told / capacity
        if 0.9 <= learnt <= 1.1:
            return
    pytest.fail(f"{learnt:.2f} of it, after {TRIES} turns")
