"""Parts that go as they are: a long one in batches of its own, so that others have their turn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvxfer.identity import TransferId
from kvxfer.protocol import parts
from kvxfer.protocol.values import Ended
from kvxfer.testing import Network
from tests.control.conftest import SeededEngine, fetch, offered

LONG, SHORT = TransferId("own/1/long", 0), TransferId("own/1/short", 0)
BLOCKS = 200


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_short_load_does_not_wait_for_a_long_one(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Whatever moves takes its time here, as in a library that moves one batch after the other, and the long one began before."""
    monkeypatch.setattr(parts, "HOST_BYTES", 8 << 10)
    net = Network()
    options = {"verbs": [verb], "run_bytes": 1, "network": net}
    p, d = engine(dict(options), blocks=400, seed=1), engine(dict(options), blocks=400)
    warm = TransferId("own/1/warm", 0)
    p.agents[0].offer(offered([399], 4, transfer=warm))
    d.agents[0].fetch(fetch(p.source, [399], 4, transfer=warm, handle="warm"))
    d.wait(Ended)
    net.delay_s = 0.02
    for transfer, blocks in ((LONG, list(range(BLOCKS))), (SHORT, [BLOCKS])):
        p.agents[0].offer(offered(blocks, 4 * len(blocks), transfer=transfer))
        d.agents[0].fetch(fetch(p.source, blocks, 4 * len(blocks), transfer=transfer, handle=transfer.base))
    ends = d.wait(Ended, count=3)
    assert [end.handle for end in ends[1:]] == [SHORT.base, LONG.base] and all(end.outcome.delivered for end in ends)
    assert all(np.array_equal(d.block(i), p.block(i)) for i in range(BLOCKS + 1))
