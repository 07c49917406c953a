"""The chaos benchmark: two producers and two consumers of one and two ranks hold under kills, stops and preemptions."""

from __future__ import annotations

import pytest

from kvxfer_bench.chaos import measure


@pytest.mark.slow
def test_nothing_is_wrong_late_or_lost_in_a_short_run() -> None:
    said: list[str] = []
    found = measure(8.0, 1.0, 5, {"backend": "tcp"}, say=said.append)
    assert found["complaints"] == []
    assert found["outcomes"]["delivered"] > 0 and sum(found["faults"].values()) >= 2
    assert said == ["0 of 8 s: 0 delivered, 0 faults, 0 complaints", "waiting until everything has ended"], (
        "how far it is"
    )
