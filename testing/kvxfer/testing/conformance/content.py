"""What memory must hold after runs have been moved, and a comparison that says what is wrong."""

from __future__ import annotations

import numpy as np

from kvxfer.geometry import Runs
from kvxfer.testing.participant import Bytes


def overlay(target: Bytes, source: Bytes, runs: Runs) -> Bytes:
    """Return what the target holds after the runs have been moved."""
    result = target.copy()
    for src, dst, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        result[dst : dst + n] = source[src : src + n]
    return result


def assert_equal(found: Bytes, expected: Bytes, what: str) -> None:
    """Compare bytes; fail with the number of wrong ones and the place of the first."""
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{what}: {len(wrong)} bytes are wrong, the first at flat offset {int(wrong[0])}"
