"""The soak benchmark: nothing is left after it, and it would say so if anything grew."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.bench.soak import ALLOWED, FIGURES, ROWS, WATCHED, complaints, measure


@pytest.mark.slow
def test_nothing_is_wrong_or_left_after_a_short_run() -> None:
    """Too short a run to say whether anything grows."""
    said: list[str] = []
    found = measure(6.0, 3.0, say=said.append)
    assert [c for c in found["complaints"] if "grew" not in c] == []
    assert found["restarts"] >= 1 and found["outcomes"]["delivered"] > 0
    assert len(said) == len(found["samples"]) + 1 and "of 6 s:" in said[0] and "end" in said[-1], "how far it is"


def rows(**slopes: float) -> list[dict[str, Any]]:
    """Samples in which some figures of the producer grow from first to last."""
    steady = dict.fromkeys(FIGURES, 10.0)
    return [
        {"seconds": i, "consumer": steady, "producer": {**steady, **{k: 10 + s * i / ROWS for k, s in slopes.items()}}}
        for i in range(ROWS)
    ]


@pytest.mark.parametrize("figure", FIGURES)
def test_what_grows_is_named(figure: str) -> None:
    assert complaints(rows()) == []
    assert complaints(rows(**{figure: ALLOWED[figure] / 2})) == [] or ALLOWED[figure] == 0
    (complaint,) = complaints(rows(**{figure: 2 * ALLOWED[figure] + 2}))
    assert figure in complaint and WATCHED[0] in complaint
