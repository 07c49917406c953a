"""The chaos benchmark: two producers and two consumers of one and two ranks hold under kills, stops and preemptions."""

from __future__ import annotations

import random
from contextlib import closing

import pytest

from kvxfer.bench import world
from kvxfer.bench.chaos import measure
from kvxfer.errors import KvxferError


@pytest.mark.slow
def test_nothing_is_wrong_late_or_lost_in_a_short_run() -> None:
    said: list[str] = []
    settings = {"backend": "tcp", "integrity": "full", "staging_bytes": 4 << 20}
    found = measure(8.0, 1.0, 5, settings, say=said.append)
    assert found["complaints"] == []
    assert found["outcomes"]["delivered"] > 0 and sum(found["faults"].values()) >= 2
    assert said == ["0 of 8 s: 0 delivered, 0 faults, 0 complaints", "waiting until everything has ended"], (
        "how far it is"
    )


def test_an_engine_that_does_not_start_in_time_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"backend": "tcp", "staging_bytes": 4 << 20}
    engines = world.RankedWorld({"producer": 1}, 16, random.Random(0), settings, "cpu", lambda name, result: None)
    with closing(engines):
        assert engines.runs("producer")
        engines.kill("producer")
        assert not engines.runs("producer")
        monkeypatch.setattr(world, "START_S", 0.0)
        engines.start("producer")
        assert not engines.runs("producer")
        with pytest.raises(KvxferError, match="the producer did not start within 0 s"):
            engines.turn()
