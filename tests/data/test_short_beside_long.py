"""A short load beside a long one that both sides move, over real agents: it waits for the parts that are under way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvxfer.config import SLOTS
from kvxfer.identity import TransferId
from kvxfer.protocol import parts
from kvxfer.protocol.values import Ended, Progress
from kvxfer.values import BlockTable, Fetch
from tests.control.conftest import SeededEngine, fetch, offered

LONG, SHORT, WARM = (TransferId(f"own/1/{name}", 0) for name in ("long", "short", "warm"))
PARTS, PART_S = 30, 0.1
SLACK = 5
"""Parts that may go by before the producer has heard of the short load: half a second."""


@pytest.mark.parametrize(("unit", "moved"), [(16, "staged"), (64, "direct")])
def test_a_short_load_waits_for_the_parts_under_way(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, unit: int, moved: str
) -> None:
    """Over a link that takes its time for each part, as a slow one does for each 32 MiB."""
    block = 3 * 4 * 4 * unit
    most = 16 * block
    monkeypatch.setattr(parts, "HOST_BYTES", most)
    slow = {"backend": "kvxfer.testing.faults:Faulty", "inner": "zmq", "bytes_per_s": most / PART_S}
    config = {
        "unit": unit,
        "blocks": 16 * PARTS + 2,
        "staging_bytes": SLOTS * 4096,
        "transfer_timeout": 20.0,
        "lease": 20.0,
    }
    p, d = engine(dict(slow), seed=1, **config), engine(dict(slow), **config)
    long, short = [*range(16 * PARTS)], [16 * PARTS]
    for transfer, blocks in ((WARM, [16 * PARTS + 1]), (LONG, long), (SHORT, short)):
        p.agents[0].offer(offered(blocks, 4 * len(blocks), transfer=transfer))
    d.agents[0].fetch(fetch(p.source, [16 * PARTS + 1], 4, transfer=WARM, handle="warm"))
    d.wait(Ended)
    d.agents[0].fetch(Fetch("long", LONG, b"d", p.source, BlockTable.of([long]), 0, 4 * len(long), progress=1))
    d.agents[0].fetch(fetch(p.source, short, 4, transfer=SHORT, handle="short"))
    ends = d.wait(Ended, count=3)
    assert [end.handle for end in ends] == ["warm", "short", "long"] and all(end.outcome.delivered for end in ends)
    before = d.seen[0][: d.seen[0].index(ends[1])]
    here = max((event.tokens for event in before if isinstance(event, Progress)), default=0)
    assert here / (4 * 16) <= parts.AHEAD + SLACK < PARTS / 2, "parts of the long load that came before the short one"
    assert np.array_equal(*(np.stack([side.block(i) for i in (*long, *short)]) for side in (p, d)))
    stats = p.agents[0].stats()
    assert (stats.direct, stats.staged) == ((0, PARTS + 2) if moved == "staged" else (PARTS + 2, 0))
