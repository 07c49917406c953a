"""The soak benchmark: nothing is left after it, and it would say so if anything grew."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer_bench.soak import ALLOWED, DEVICE_MIB, FIGURES, ROWS, WATCHED, complaints, left_behind, measure


@pytest.mark.slow
def test_nothing_is_wrong_or_left_after_a_short_run() -> None:
    """Too short a run to say whether anything grows."""
    said: list[str] = []
    found = measure(9.0, 3.0, say=said.append)
    assert [c for c in found["complaints"] if "grew" not in c] == []
    assert found["restarts"] >= 2 and found["alone"] and found["outcomes"]["delivered"] > 0
    assert len(said) == len(found["samples"]) + 1 and "of 9 s:" in said[0] and "end" in said[-1], "how far it is"


def rows(**slopes: float) -> list[dict[str, Any]]:
    """Samples in which some figures of the producer grow from first to last."""
    steady = dict.fromkeys(FIGURES, 10.0)
    return [
        {"seconds": i, "consumer": steady, "producer": {**steady, **{k: 10 + s * i / ROWS for k, s in slopes.items()}}}
        for i in range(ROWS)
    ]


@pytest.mark.parametrize("figure", ALLOWED)
def test_what_grows_is_named(figure: str) -> None:
    assert complaints(rows()) == []
    assert complaints(rows(**{figure: ALLOWED[figure] / 2})) == [] or ALLOWED[figure] == 0
    (complaint,) = complaints(rows(**{figure: 2 * ALLOWED[figure] + 2}))
    assert figure in complaint and WATCHED[0] in complaint


def test_memory_of_dead_peers_is_named() -> None:
    def with_mib(mib: float) -> dict[str, dict[str, float]]:
        return {name: {"device_MiB": mib} for name in WATCHED}

    assert left_behind({}, with_mib(900.0)) == left_behind(with_mib(100.0), with_mib(100.0 + DEVICE_MIB)) == []
    complaints = left_behind(with_mib(100.0), with_mib(101.0 + DEVICE_MIB))
    assert [c.split(":")[0] for c in complaints] == list(WATCHED) and "device_MiB" in complaints[0]
