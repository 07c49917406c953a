"""View groups: assignments with the same strides, block tables and heads, resolved to numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvxfer.geometry.assignment import ShardAssignment
from kvxfer.geometry.cache import Cache
from kvxfer.geometry.pattern import Axis, CopyPattern, Ints, merge
from kvxfer.geometry.segments import Segments
from kvxfer.geometry.strided_copy import StridedCopy

__all__ = ["ViewGroup", "LogicalCopy", "view_groups"]

_MOST_ROWS = 1 << 16
"""Rows of a pattern: segments are cut shorter before it grows past this, so that it stays small and soon made."""

_MOST_TOKENS = 64


@dataclass(frozen=True, eq=False)
class ViewGroup:
    """``names``: plane and layer of each cell. ``src_cells``, ``dst_cells``: their offsets at the first assigned head
    and token 0, int64 ``[cells]``. ``heads``: number, and stride on both sides; the first is the model's
    ``first_head``. ``src_token``, ``dst_token``: token strides, 0 where tokens are opaque."""

    src_group: int
    dst_group: int
    opaque: bool
    src_stride: int
    dst_stride: int
    src_token: int
    dst_token: int
    heads: Axis
    first_head: int
    unit: int
    src_blocks: int
    dst_blocks: int
    names: tuple[tuple[str, str], ...]
    src_cells: Ints
    dst_cells: Ints
    _merged: list[CopyPattern] = field(init=False)
    _made: dict[tuple[int, int], list[CopyPattern]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_merged", merge(self.src_cells, self.dst_cells, self.unit, [self.heads]))

    @cached_property
    def most_tokens(self) -> int:
        """How long a segment may be: tokens that do not follow each other on both sides cost rows."""
        loose = sum(len(t) for t in self._merged if not self._follows(t))
        if self.opaque or not loose:
            return 1 << 62
        return max(1, min(_MOST_TOKENS, 1 << (_MOST_ROWS // loose).bit_length() >> 1))

    def at(self, s: Segments) -> LogicalCopy:
        """The view_group at these segments."""
        return LogicalCopy(
            self,
            s.src_block * self.src_stride + s.src_token * self.src_token,
            s.dst_block * self.dst_stride + s.dst_token * self.dst_token,
            s.token,
            np.ones(len(s.count), np.int64) if self.opaque else s.count,
        )

    def _follows(self, t: CopyPattern) -> bool:
        """Whether a token's row continues in the next token on both sides, so that rows grow with the count."""
        return self.src_token == self.dst_token == t.unit

    def _with_tokens(self, i: int, count: int) -> list[CopyPattern]:
        """The merged pattern ``i`` for segments of ``count`` tokens."""
        found = self._made.get((i, count))
        if found is None:
            t = self._merged[i]
            found = merge(t.src_cells, t.dst_cells, t.unit, [*t.axes, (count, self.src_token, self.dst_token)])
            if len(found) == 1 and found[0].unit == t.unit * count:
                found = [t]  # nothing but the tokens merged: one pattern serves all counts
            self._made[i, count] = found
        return found


@dataclass(frozen=True, eq=False)
class LogicalCopy:
    """A view_group at segments, in logical coordinates: int64 ``[segments]`` each.

    ``src_at``, ``dst_at``: flat offset of the segment's first token on either side, to which a cell's offset is added.
    ``token``: its first token (of a state: the token after which it stands, counted from 1). ``count``: its tokens,
    1 where they are opaque.
    """

    view_group: ViewGroup
    src_at: Ints
    dst_at: Ints
    token: Ints
    count: Ints

    def copies(self) -> Iterator[StridedCopy]:
        """The part with all that is contiguous merged: a strided for each pattern and way of counting."""
        b = self.view_group
        if b.opaque:
            yield from (StridedCopy(t, self.src_at, self.dst_at, self.count) for t in b._merged)
            return
        least, most = int(np.minimum.reduce(self.count)), int(np.maximum.reduce(self.count))
        if least == most:
            for i, tile in enumerate(b._merged):
                for t in b._with_tokens(i, most):
                    yield StridedCopy(
                        t, self.src_at, self.dst_at, self.count if t is tile else np.ones(len(self.count), np.int64)
                    )
            return
        counts = np.flatnonzero(np.bincount(self.count)).tolist()
        for i, tile in enumerate(b._merged):
            plain = [n for n in counts if b._with_tokens(i, n)[0] is tile]
            groups = ([plain] if plain else []) + [[n] for n in counts if n not in plain]
            for group, (src, dst, count) in zip(groups, self._by(groups), strict=True):
                for t in b._with_tokens(i, group[0]):
                    yield StridedCopy(t, src, dst, count if t is tile else np.ones(len(count), np.int64))

    def _by(self, groups: list[list[int]]) -> list[tuple[Ints, ...]]:
        """Places and counts of the segments whose count is in each group, in their order."""
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
    """Resolve assignments and put those together that can share segments and patterns, in the order of the assignments."""
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
