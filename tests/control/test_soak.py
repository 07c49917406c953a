"""The soak benchmark: nothing is left after it."""

from __future__ import annotations

import pytest

from kvxfer_bench.soak import measure


@pytest.mark.slow
def test_nothing_is_wrong_or_left_after_a_short_run() -> None:
    """Too short a run to say whether anything grows."""
    said: list[str] = []
    found = measure(9.0, 3.0, say=said.append)
    assert [c for c in found["complaints"] if "grew" not in c] == []
    assert found["restarts"] >= 2 and found["alone"] and found["outcomes"]["delivered"] > 0
    assert len(said) == len(found["samples"]) + 1 and "of 9 s:" in said[0] and "end" in said[-1], "how far it is"
