"""View groups: assignments with the same strides, block tables and heads, resolved to numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry.assignment import ShardAssignment
from kvxfer.geometry.cache import Cache
from kvxfer.geometry.pattern import Axis, CopyPattern, merge
from kvxfer.geometry.segments import Segments, greatest, least
from kvxfer.geometry.strided_copy import StridedCopy
from kvxfer.geometry.turns import Shared

_MAX_ROWS = 1 << 16
"""The most rows of a pattern; segments are cut shorter rather than exceed it, so that it stays small and quick to make."""

_MAX_TOKENS = 64

_ROW_BYTES = 64 << 10
"""The most bytes that are moved in vain to have one row less: a device's link moves them in less time than a descriptor takes."""

_ONE = np.ones(1, np.int64)
_ONE.setflags(write=False)


def _ones(n: int) -> Ints:
    """Return an array of ones that must not be written to."""
    return _ONE if n == 1 else np.ones(n, np.int64)


@dataclass(frozen=True, eq=False)
class ViewGroup:
    """Assignments with the same strides, block tables and heads: what is copied of each token, before tokens are known."""

    src_group: int  # group of the producer's block table
    dst_group: int  # group of the consumer's block table
    opaque: bool  # whether the tokens of a block must not be cut
    shared: Shared  # which tokens both ranks hold
    src_stride: int  # bytes from one block to the next in the source
    dst_stride: int  # bytes from one block to the next in the destination
    src_token: int  # bytes from one token to the next of those in the source, 0 where tokens are opaque
    dst_token: int  # bytes from one token to the next of those in the destination, 0 where tokens are opaque
    heads: Axis  # number of heads, and stride on both sides
    first_head: int  # the model's index of the first of them
    unit: int  # contiguous bytes of one head of one token
    src_blocks: int  # number of blocks in the source
    dst_blocks: int  # number of blocks in the destination
    names: tuple[tuple[str, str], ...]  # plane and layer of each cell
    src_cells: Ints  # offset of each cell in the source at the first assigned head and token 0, int64 ``[cells]``
    dst_cells: Ints  # the same in the destination
    _merged: list[CopyPattern] = field(init=False)
    _made: dict[tuple[int, int], list[CopyPattern]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_merged", merge(self.src_cells, self.dst_cells, self.unit, [self.heads]))

    @property
    def least_row(self) -> int:
        """Bytes of the shortest row of any copy of this group."""
        return min(t.unit for t in self._merged)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a token, or of a block whose tokens are opaque."""
        return sum(t.nbytes for t in self._merged)

    @cached_property
    def most_tokens(self) -> int:
        """The most tokens of a segment: tokens that do not follow each other on both sides cost rows."""
        loose = sum(len(t) for t in self._merged if not self._follows(t))
        if self.opaque or not loose:
            return 1 << 62
        return max(1, min(_MAX_TOKENS, 1 << (_MAX_ROWS // loose).bit_length() >> 1))

    def tokens(self, count: int) -> Axis:
        """Return the axis of the tokens of a segment."""
        return count, self.shared.src_step * self.src_token, self.shared.dst_step * self.dst_token

    def filled(self, count: int, block: int) -> int:
        """Return how many tokens are moved of a block's first ``count`` ones if the others may be: all, if the fewer rows are worth it."""
        fewer = self._rows(count) - self._rows(block)
        return block if (block - count) * self.segment_bytes <= fewer * _ROW_BYTES else count

    def _rows(self, count: int) -> int:
        """Return the rows of a segment of ``count`` tokens."""
        return sum(len(t) for i in range(len(self._merged)) for t in self._with_tokens(i, count))

    def at(self, s: Segments) -> LogicalCopy:
        """Return the copy of this group's content at these segments."""
        src, dst = s.src_block * self.src_stride, s.dst_block * self.dst_stride
        if self.opaque:
            return LogicalCopy(self, src, dst, s.token, _ones(len(s.count)))
        src, dst = src + s.src_token * self.src_token, dst + s.dst_token * self.dst_token
        return LogicalCopy(self, src, dst, s.token, s.count)

    def _follows(self, t: CopyPattern) -> bool:
        """Return whether a token's row continues in the next token on both sides, so that rows grow with the count."""
        return self.tokens(1)[1:] == (t.unit, t.unit)

    def _with_tokens(self, i: int, count: int) -> list[CopyPattern]:
        """Return the merged pattern ``i`` extended by an axis of ``count`` tokens."""
        found = self._made.get((i, count))
        if found is None:
            t = self._merged[i]
            found = merge(t.src_cells, t.dst_cells, t.unit, [*t.axes, self.tokens(count)])
            if len(found) == 1 and found[0].unit == t.unit * count:
                found = [t]  # nothing but the tokens merged: one pattern serves all counts
            self._made[i, count] = found
        return found


class LogicalCopy(msgspec.Struct, frozen=True, gc=False, eq=False):
    """A view group at segments, in logical coordinates."""

    view_group: ViewGroup  # what is copied of each token
    # flat offset of each segment's first token in the source, to which a cell's offset is added; int64 ``[segments]``
    src_at: Ints
    dst_at: Ints  # the same in the destination
    token: Ints  # first token of each segment (of a state: the token after which it stands, counted from 1)
    count: Ints  # tokens of each segment, 1 where they are opaque

    def filled(self, block: int) -> LogicalCopy:
        """Return the same with all tokens of the block of which the last segment holds the first ones, if that is worth it.

        ``block``: the tokens of that block here.
        """
        count = int(self.count[-1])
        most = self.view_group.filled(count, block) if count < block else count
        if most == count:
            return self
        counts = self.count.copy()
        counts[-1] = most
        return LogicalCopy(self.view_group, self.src_at, self.dst_at, self.token, counts)

    def copies(self) -> list[StridedCopy]:
        """Return the strided copies that do it, with everything contiguous merged.

        There is one for each merged pattern and each number of tokens that needs a pattern of its own.
        """
        b = self.view_group
        if b.opaque:
            return [StridedCopy(t, self.src_at, self.dst_at, self.count) for t in b._merged]
        return list(self._by_tokens())

    def _by_tokens(self) -> Iterator[StridedCopy]:
        """Yield the strided copies of what can be cut by token."""
        b = self.view_group
        fewest, most = least(self.count), greatest(self.count)
        if fewest == most:
            for i, tile in enumerate(b._merged):
                for t in b._with_tokens(i, most):
                    yield StridedCopy(t, self.src_at, self.dst_at, self.count if t is tile else _ones(len(self.count)))
            return
        counts = np.flatnonzero(np.bincount(self.count)).tolist()
        for i, tile in enumerate(b._merged):
            plain = [n for n in counts if b._with_tokens(i, n)[0] is tile]
            groups = ([plain] if plain else []) + [[n] for n in counts if n not in plain]
            for group, (src, dst, count) in zip(groups, self._by(groups), strict=True):
                for t in b._with_tokens(i, group[0]):
                    yield StridedCopy(t, src, dst, count if t is tile else _ones(len(count)))

    def _by(self, groups: list[list[int]]) -> list[tuple[Ints, ...]]:
        """Return places and counts of the segments whose count is in each group, in their order."""
        columns: tuple[Ints, ...] = (self.src_at, self.dst_at, self.count)
        if len(groups) == 1:
            return [columns]
        group_of = np.zeros(int(self.count.max()) + 1, np.uint8 if len(groups) < 256 else np.int64)
        for g, counts in enumerate(groups):
            group_of[counts] = g
        which = group_of[self.count]
        order = np.argsort(which, kind="stable")
        columns = tuple(c[order] for c in columns)
        ends = np.cumsum(np.bincount(which, minlength=len(groups))).tolist()
        return [tuple(c[lo:hi] for c in columns) for lo, hi in zip([0, *ends], ends, strict=False)]


def view_groups(src: Cache, dst: Cache, assignments: Sequence[ShardAssignment]) -> list[ViewGroup]:
    """Resolve assignments, and join those that can share segments and patterns; in the order of the assignments."""
    cells: dict[tuple[object, ...], list[tuple[tuple[str, str], int, int]]] = defaultdict(list)
    src_at, dst_at = ([dict(zip(v.layers, v.offsets, strict=True)) for v in cache.views] for cache in (src, dst))
    for c in assignments:
        s, d = src.views[c.src_view], dst.views[c.dst_view]
        heads, s_first, d_first = (1, 0, 0), 0, 0
        if s.heads is not None and d.heads is not None and s.heads.stride is not None and d.heads.stride is not None:
            heads = c.head_hi - c.head_lo, s.heads.stride, d.heads.stride
            s_first, d_first = (c.head_lo - s.heads.start) * heads[1], (c.head_lo - d.heads.start) * heads[2]
        key = (
            s.group,
            d.group,
            s.token_stride is None,
            Shared(s.held, d.held),
            s.block_stride,
            d.block_stride,
            s.token_stride or 0,
            d.token_stride or 0,
            heads,
            c.head_lo,
            s.unit,
            s.blocks,
            d.blocks,
        )
        s_at, d_at = src_at[c.src_view], dst_at[c.dst_view]
        cells[key] += [((d.plane, name), s_at[name] + s_first, d_at[name] + d_first) for name in c.layers]
    return [_view_group(key, of) for key, of in cells.items()]


def _view_group(key: Any, cells: list[tuple[tuple[str, str], int, int]]) -> ViewGroup:
    src, dst = (np.array([cell[i] for cell in cells], np.int64) for i in (1, 2))
    fields: Any = (*key, tuple(cell[0] for cell in cells), src, dst)
    return ViewGroup(*fields)
