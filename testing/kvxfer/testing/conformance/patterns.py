"""Runs drawn at random, of the patterns that back ends treat in different ways."""

from __future__ import annotations

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry import Runs

SHORT, MAX_RUNS = 64, 1500


def drawn(dice: np.random.Generator, source: tuple[int, int], target: tuple[int, int]) -> Runs:
    """Return runs from anywhere in one stretch (offset, bytes) to places in another that do not overlap.

    They are one or many, equal or not, aligned or odd, and may be empty. On each side they touch or leave gaps, in rising, falling or
    any order; several may have the same source.
    """
    room = min(source[1], target[1])
    kind = dice.choice(["one", "few", "equal", "short", "mixed"])
    if kind == "one":
        lengths = np.array([room - int(dice.integers(0, min(room, 4096)))])
    elif kind == "few":
        cuts = np.sort(dice.integers(0, room, int(dice.integers(2, 9))))
        lengths = np.diff(cuts, prepend=0)
    elif kind == "equal":
        length = min(int(dice.choice([1, 64, 333, 512, 4096, 16 << 10])), room)
        lengths = np.full(min(room // length, int(dice.integers(1, MAX_RUNS))), length)
    else:
        longest = SHORT if kind == "short" else 4 * room // MAX_RUNS
        lengths = dice.integers(0, longest + 1, int(dice.integers(1, MAX_RUNS)))
        lengths = lengths[np.cumsum(lengths) <= room]
    dst = _laid(dice, lengths, *target)
    src = _laid(dice, lengths, *source)
    if dice.random() < 0.1:  # anywhere, and so in part from the same bytes
        src = source[0] + dice.integers(0, source[1] - lengths + 1)
    order = dice.permutation(len(lengths)) if dice.random() < 0.4 else slice(None)
    return Runs.of(src[order], dst[order], lengths[order])


def _laid(dice: np.random.Generator, lengths: Ints, start: int, room: int) -> Ints:
    """Return places for runs within a stretch: one behind the other in some order, all with the same gap (which may be none)."""
    count = len(lengths)
    order = [np.arange(count), np.arange(count)[::-1], dice.permutation(count)][int(dice.choice(3, p=[0.6, 0.2, 0.2]))]
    spare = room - int(lengths.sum())
    gap = int(dice.choice([0, min(1, spare // max(count, 1)), spare // max(count, 1)]))
    places = np.empty(count, np.int64)
    places[order] = start + np.cumsum(lengths[order] + gap) - lengths[order] - gap
    return places
