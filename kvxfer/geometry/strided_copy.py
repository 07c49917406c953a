"""Strided copies: segments times a pattern. The factored form of what is copied, and what can be made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry.pattern import CopyPattern

_FEW = 4096
"""Up to this many runs, ordering them to join the last neighbours costs less than a single message."""


class Runs(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Coalesced byte runs: int64 arrays of one length, flat offsets in the source's and destination's cache."""

    src: Ints
    dst: Ints
    length: Ints

    @classmethod
    def of(cls, src: Sequence[int] | Ints, dst: Sequence[int] | Ints, length: Sequence[int] | Ints) -> Runs:
        """Return runs from any sequences of numbers."""
        return cls(np.asarray(src, np.int64), np.asarray(dst, np.int64), np.asarray(length, np.int64))

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        """Bytes of all runs."""
        return int(self.length.sum())


class StridedCopy(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Segments times the rows of a pattern.

    Row ``r`` of segment ``s`` copies ``pattern.unit * counts[s]`` contiguous bytes from flat offset ``src_at[s] +
    src_rows[r]`` to ``dst_at[s] + dst_rows[r]``. A segment is the tokens that one source block and one destination
    block have in common.
    """

    pattern: CopyPattern  # rows of every segment
    src_at: Ints  # place of each segment in the source, int64 ``[segments]``
    dst_at: Ints  # place of each segment in the destination, int64 ``[segments]``
    counts: Ints  # tokens of each segment where tokens follow each other on both sides, else 1; int64 ``[segments]``

    @property
    def src_rows(self) -> Ints:
        """Offset of each row from its segment's place in the source, int64 ``[rows]``."""
        return self.pattern.rows[0]

    @property
    def dst_rows(self) -> Ints:
        """Offset of each row from its segment's place in the destination, int64 ``[rows]``."""
        return self.pattern.rows[1]

    @property
    def row_bytes(self) -> Ints:
        """Length of every row of each segment, int64 ``[segments]``."""
        return self.counts * self.pattern.unit

    def __len__(self) -> int:
        """Return the number of (segment, row) pairs: the runs there would be if nothing coalesced."""
        return len(self.pattern) * len(self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes to copy."""
        tokens = int(self.counts[0] if len(self.counts) == 1 else np.add.reduce(self.counts))
        return self.pattern.nbytes * tokens

    def stream(self) -> tuple[Ints, Ints]:
        """Locate the bytes in the packed stream, which is segment-major.

        Returns:
            ``base`` and ``pitch``, int64 ``[segments]`` each: row ``r`` of segment ``s`` begins at ``base[s] + r *
            pitch[s]``.
        """
        pitch = self.row_bytes
        size = pitch * len(self.pattern)
        return np.cumsum(size) - size, pitch

    def split(self, max_bytes: int, first: int = 0) -> Iterator[StridedCopy]:
        """Cut this copy into pieces of at most ``max_bytes`` each.

        Cuts fall between segments; where one segment is larger, between cells and along axes; where one row is larger,
        inside it. The first piece has at most ``first`` bytes, if that is given and no segment is larger.
        """
        if not len(self.counts):
            return
        t, longest = self.pattern, int(np.maximum.reduce(self.counts))
        each = len(t) * t.unit
        if each * longest <= max_bytes:
            head = first if each * longest <= first else max_bytes
            for lo, hi in _cuts(self.counts * each, max_bytes, head):
                yield StridedCopy(t, self.src_at[lo:hi], self.dst_at[lo:hi], self.counts[lo:hi])
        elif len(t.src_cells) > 1:
            step = max(1, max_bytes // (len(t) // len(t.src_cells) * t.unit * longest))
            for i in range(0, len(t.src_cells), step):
                part = CopyPattern(t.src_cells[i : i + step], t.dst_cells[i : i + step], t.axes, t.unit)
                yield from StridedCopy(part, *self._places).split(max_bytes)
        elif t.axes:
            unrolled = CopyPattern(t.src_cells, t.dst_cells, t.axes[:1], t.unit).rows
            yield from StridedCopy(CopyPattern(*unrolled, t.axes[1:], t.unit), *self._places).split(max_bytes)
        elif longest > 1:
            yield from self._chopped(max(1, max_bytes // t.unit)).split(max_bytes)
        else:
            for done in range(0, t.unit, max_bytes):
                part = CopyPattern(t.src_cells + done, t.dst_cells + done, (), min(max_bytes, t.unit - done))
                yield from StridedCopy(part, *self._places).split(max_bytes)

    @property
    def _places(self) -> tuple[Ints, Ints, Ints]:
        return self.src_at, self.dst_at, self.counts

    def _chopped(self, most: int) -> StridedCopy:
        """Cut segments into segments of at most ``most`` counts. Only for a pattern of one row."""
        pieces = -(-self.counts // most)
        whose = np.repeat(np.arange(len(pieces)), pieces)
        done = (np.arange(len(whose)) - (np.cumsum(pieces) - pieces)[whose]) * most
        skip = done * self.pattern.unit
        return StridedCopy(
            self.pattern,
            self.src_at[whose] + skip,
            self.dst_at[whose] + skip,
            np.minimum(self.counts[whose] - done, most),
        )


def joined(copies: Iterable[StridedCopy]) -> list[StridedCopy]:
    """Return copies that do what these do, one for each pattern."""
    alike: dict[CopyPattern, list[StridedCopy]] = {}
    for strided in copies:
        alike.setdefault(strided.pattern, []).append(strided)
    return [
        StridedCopy(
            pattern,
            np.concatenate([s.src_at for s in some]),
            np.concatenate([s.dst_at for s in some]),
            np.concatenate([s.counts for s in some]),
        )
        for pattern, some in alike.items()
    ]


def materialise(copies: Sequence[StridedCopy]) -> Runs:
    """Turn copies into byte runs, with segments that continue each other on both sides joined.

    The order is by copy, stretch of joined segments, row. If few runs are left, they are ordered by destination and
    joined across rows and copies too.
    """
    rows = sum(map(len, copies))
    few = rows <= _FEW  # then what continues its neighbour is joined at the end, all at once
    if rows == 1:
        only = next(s for s in copies if len(s))
        return Runs(only.src_at + only.src_rows, only.dst_at + only.dst_rows, only.row_bytes)
    stretches = [(s.src_at, s.dst_at, s.row_bytes) if few else _stretches(s) for s in copies]
    total = sum(len(s.pattern) * len(at[0]) for s, at in zip(copies, stretches, strict=True))
    src, dst, length = (np.empty(total, np.int64) for _ in range(3))
    done = 0
    for strided, (src_at, dst_at, size) in zip(copies, stretches, strict=True):
        shape = len(size), len(strided.pattern)
        here = slice(done, done + shape[0] * shape[1])
        np.add(src_at[:, None], strided.src_rows[None, :], out=src[here].reshape(shape))
        np.add(dst_at[:, None], strided.dst_rows[None, :], out=dst[here].reshape(shape))
        length[here].reshape(shape)[...] = size[:, None]
        done = here.stop
    if 1 < total <= _FEW:
        order = np.argsort(dst)  # no two are equal
        return _joined(src[order], dst[order], length[order])
    return Runs(src, dst, length)


def _stretches(strided: StridedCopy) -> tuple[Ints, Ints, Ints]:
    """Join segments that continue each other on both sides, the same for all rows.

    They are taken in the order of the destination. A pool that frees the last block of a request first hands blocks out
    backwards the next time, as vLLM's does: then each segment continues the one behind it.

    Return source place, destination place and row length of each stretch.
    """
    src, dst, length = strided.src_at, strided.dst_at, strided.row_bytes
    if (dst[1:] < dst[:-1]).any():
        order = np.argsort(dst)  # no two are equal
        src, dst, length = src[order], dst[order], length[order]
    runs = _joined(src, dst, length)
    return runs.src, runs.dst, runs.length


def _joined(src: Ints, dst: Ints, length: Ints) -> Runs:
    """Merge neighbours (in the given order) that continue each other on both sides."""
    step = length[:-1]
    joint = (src[1:] - src[:-1] == step) & (dst[1:] - dst[:-1] == step)
    if not joint.any():
        return Runs(src, dst, length)
    first = np.flatnonzero(np.concatenate(([True], ~joint)))
    last = np.append(first[1:], len(src)) - 1
    return Runs(src[first], dst[first], src[last] + length[last] - src[first])


def _cuts(sizes: Ints, limit: int, first: int) -> Iterator[tuple[int, int]]:
    """Split a list of sizes into consecutive ranges ``[lo, hi)`` whose sums stay within ``limit``.

    The sum of the first range stays within ``first``. No size may exceed either.
    """
    ends, lo, base, room = sizes.cumsum(), 0, 0, first
    while lo < len(sizes):
        hi = int(ends.searchsorted(base + room, side="right"))
        yield lo, hi
        lo, base, room = hi, int(ends[hi - 1]), limit
