"""Plans and runs as tables for the kernel (``copy.cu``): rows that stay on the device, segments that go with a launch.

Pure numpy: flat offsets and region addresses in, tables out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvxfer.backend.runs import split_long
from kvxfer.block_table import Ints
from kvxfer.geometry import CopyPattern, Region, StridedCopy
from kvxfer.geometry.region import flat_starts

MAX_ROWS = 1 << 16
MAX_SEGMENTS = 1 << 15
MAX_CHUNKS = (1 << 31) - 1
WIDEST = 16
"""Bytes that one lane moves at once."""

LINE = 128
"""Bytes that neighbouring lanes should have in common: shorter accesses waste the link."""

LANES, HELD = 32, 8
"""Lanes of a warp, and words that each holds at once (``HELD`` of the kernel)."""

LONG_RUN = 16384
"""Longer runs are cut if most are shorter: the runs of a launch are dealt out as if all were as long as the longest."""


MAX_RUN = 1 << 31
"""Longer runs are cut in any case: the kernel counts the words of a row in 32 bits."""


# Reductions by their ufuncs: the methods of the same names take twice as long, in front of every copy.
def _bits(values: Ints) -> int:
    return int(np.bitwise_or.reduce(values))


def _most(values: Ints) -> int:
    return int(np.maximum.reduce(values))


@dataclass(frozen=True, eq=False)
class AddressRows:
    """Source and destination address of each row, less the place of its segment: int64 ``[2, rows]``.

    ``bits``: all of them or-ed, which shows how they are aligned.
    """

    table: Ints
    bits: int

    @classmethod
    def of(cls, src: Ints, dst: Ints) -> AddressRows:
        return cls(np.stack([src, dst]), _bits(src) | _bits(dst))

    def __len__(self) -> int:
        return int(self.table.shape[1])


ONE_ROW = AddressRows.of(np.zeros(1, np.int64), np.zeros(1, np.int64))
"""For runs, which carry their addresses themselves."""


@dataclass(frozen=True)
class Tile:
    """How rows of a length are dealt to a warp: ``lanes`` x ``steps`` words make a chunk (both powers of two)."""

    lanes: int
    steps: int

    @classmethod
    def of(cls, words: int, word: int) -> Tile:
        """For rows of ``words`` words of ``word`` bytes: as few lookups a byte as the row's length allows."""
        whole = min(LANES * HELD, 1 << words.bit_length() - 1)
        lanes = min(LANES, whole, max(whole // HELD, LINE // word))
        return cls(lanes, whole // lanes)


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel launch.

    ``src_at``, ``dst_at``, ``counts``: int64 ``[segments]``, places in bytes as the rows expect them; row ``r`` of
    segment ``s`` is ``unit * counts[s]`` words of ``word`` bytes, ``chunks`` chunks at most.
    """

    rows: AddressRows
    src_at: Ints
    dst_at: Ints
    counts: Ints
    unit: int
    word: int
    tile: Tile
    chunks: int

    @property
    def total(self) -> int:
        return self.chunks * len(self.rows) * len(self.counts)

    @property
    def nbytes(self) -> int:
        return len(self.rows) * self.unit * self.word * int(self.counts.sum())

    def runs(self) -> tuple[Ints, Ints, Ints]:
        """Source and destination address and length of every row of every segment."""
        src = self.src_at[:, None] + self.rows.table[0]
        dst = self.dst_at[:, None] + self.rows.table[1]
        length = np.broadcast_to((self.counts * (self.unit * self.word))[:, None], src.shape)
        return src.ravel(), dst.ravel(), length.ravel()


@dataclass(frozen=True, eq=False)
class Placement:
    """A pattern's rows as addresses of a pair of memories, for the segments whose places lie within bounds.

    Source places in ``[src_low, src_high]``, where the latter is the end of the longest row, and so for the
    destination.
    """

    rows: tuple[AddressRows, ...]
    src_low: int
    src_high: int
    dst_low: int
    dst_high: int

    @classmethod
    def of(
        cls, pattern: CopyPattern, src: Sequence[Region], dst: Sequence[Region], src_at: int, dst_at: int
    ) -> Placement | None:
        """Every row keeps to the region that it is in for a segment at ``src_at`` and ``dst_at``; ``None`` when it is in none there."""
        src_rows, dst_rows = pattern.rows
        a, b = _placed(src_rows, src, src_at), _placed(dst_rows, dst, dst_at)
        if a is None or b is None:
            return None
        parts = range(0, len(pattern), MAX_ROWS)
        rows = tuple(AddressRows.of(a[0][i : i + MAX_ROWS], b[0][i : i + MAX_ROWS]) for i in parts)
        return cls(rows, a[1], a[2], b[1], b[2])

    def holds(self, strided: StridedCopy) -> bool:
        """Whether all rows of all segments lie in the regions, and the kernel can count their words. Errs to the safe side."""
        longest = strided.pattern.unit * _most(strided.counts)
        return bool(
            longest <= MAX_RUN
            and self.src_low <= np.minimum.reduce(strided.src_at)
            and _most(strided.src_at) <= self.src_high - longest
            and self.dst_low <= np.minimum.reduce(strided.dst_at)
            and _most(strided.dst_at) <= self.dst_high - longest
        )


def of_strided_copy(strided: StridedCopy, placement: Placement) -> Iterator[Launch]:
    """Yield the launches of a strided copy whose segments the placement holds."""
    for rows in placement.rows:
        yield from _launches(rows, strided.src_at, strided.dst_at, strided.counts, strided.pattern.unit)


def of_runs(src: Ints, dst: Ints, lengths: Ints) -> Iterator[Launch]:
    """Yield the launches of runs given by address and length in bytes."""
    limit = LONG_RUN * max(1, int(lengths.sum()) // max(1, len(lengths) * LONG_RUN // 2))
    lengths, src, dst = split_long(min(limit, MAX_RUN), lengths, src, dst)
    yield from _launches(ONE_ROW, src, dst, lengths, 1)


def divisor(d: int) -> tuple[int, int]:
    """Multiplier and shift so that ``x // d == x * multiplier >> shift`` for all ``0 <= x < 2**31``."""
    shift = 31 + (d - 1).bit_length()
    return -(-(1 << shift) // d), shift


def _launches(rows: AddressRows, src_at: Ints, dst_at: Ints, counts: Ints, unit: int) -> Iterator[Launch]:
    """Yield the launches of rows and segments, whose ``unit`` is in bytes.

    Where it is a single byte, counts are lengths, and their alignment matters as well.
    """
    most = _most(counts) if len(counts) else 0
    if most == 0:
        return
    bits = rows.bits | _bits(src_at) | _bits(dst_at) | WIDEST
    if unit % WIDEST and (bits | unit) & -(bits | unit) < WIDEST:
        of_counts = _bits(counts)
        whole = of_counts & -of_counts  # counts are multiples of this
        counts, most, unit = counts // whole, most // whole, unit * whole
    word = (bits | unit) & -(bits | unit)
    words = unit // word
    longest = words * most
    tile = Tile.of(longest, word)
    chunks = -(-longest // (tile.lanes * tile.steps))
    step = max(1, min(MAX_SEGMENTS, MAX_CHUNKS // (chunks * len(rows))))
    for i in range(0, len(counts), step):
        part = slice(i, i + step)
        yield Launch(rows, src_at[part], dst_at[part], counts[part], words, word, tile, chunks)


def _placed(rows: Ints, regions: Sequence[Region], at: int) -> tuple[Ints, int, int] | None:
    """Rows as addresses less the place of the segment, the lowest place and the highest end of a place's rows."""
    if not regions:
        return None
    starts = np.array(flat_starts(tuple(regions)), np.int64)
    ends = starts + np.array([r.nbytes for r in regions], np.int64)
    shift = np.array([r.address for r in regions], np.int64) - starts
    region = np.searchsorted(starts, rows + at, side="right") - 1
    if int(region.min()) < 0:
        return None
    return rows + shift[region], int((starts[region] - rows).max()), int((ends[region] - rows).min())
