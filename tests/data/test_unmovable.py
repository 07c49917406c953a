"""A cache that the back end cannot move as it is: only through staging memory, whatever a peer says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvxfer.identity import TransferId
from tests.control.conftest import Ended, Released, SeededEngine, fetch, offered


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_what_a_peer_moves_straight_lands_nowhere(
    engine: Callable[..., SeededEngine], verbs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer's cache was taken for its staging memory: the load was delivered, and its bytes were in others' slots."""
    options: dict[str, Any] = {"verbs": verbs, "elastic": False, "run_bytes": 1}
    times = {"transfer_timeout": 10.0, "lease": 10.0}  # nothing else ends the first load
    p, d = engine(dict(options), seed=1, **times), engine(dict(options), elastic=True, **times)
    name = [TransferId("own/1/unmovable", i) for i in range(2)]
    with monkeypatch.context() as careless:
        careless.setattr("kvxfer.protocol.announcements.piece_bytes", lambda plan, info: 0)
        p.agents[0].offer(offered([3], 4, transfer=name[0]))
        d.agents[0].fetch(fetch(p.source, [5], 4, transfer=name[0], handle="careless"))
        (end,) = d.wait(Ended)
    assert not end.outcome.delivered, "nothing can have arrived"
    d.wait(Released)
    assert not d.block(5).any()
    p.agents[0].offer(offered([3], 4, transfer=name[1]))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=name[1], handle="right"))
    assert d.wait(Ended, count=2)[1].outcome.delivered
    assert np.array_equal(d.block(5), p.block(3))
