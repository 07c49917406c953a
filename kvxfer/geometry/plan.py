"""Copy plans: the intersection of two caches under a block mapping, kept factored.

A plan is a few *sheets*. A sheet is a table of segments (a source block, a destination block, a phase) times a
template of rows (source offset, destination offset, length within a block), one row set for each phase. A phase
is a way in which a source block and a destination block can overlap: one when block sizes agree, a handful when
they differ, two more for a partial first and last block. Templates depend on the pair of caches alone and are
made once; a request costs only its segments.

Law (tests/geometry): copying along the plan equals indexing both caches by their logical coordinates; every
destination byte is written once; nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry.cache import Cache
from kvxfer.geometry.route import Claim, check_claims

__all__ = ["CopyPlan", "PlanError", "Planner", "Runs", "Sheet"]

Ints = NDArray[np.int64]
Rows = tuple[Ints, Ints, Ints]


class PlanError(ValueError):
    """The block tables cannot be joined (a wanted token has no source, a table is short, a cut is not allowed)."""


@dataclass(frozen=True)
class Runs:
    """Coalesced byte runs: int64 arrays of one length, flat offsets in the source's and destination's cache."""

    src: Ints
    dst: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def nbytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True)
class Sheet:
    """Segments times template rows.

    ``src_rows``, ``dst_rows``, ``lengths``: int64 ``[phases, rows]``, bytes relative to a block's offset.
    ``src_blocks``, ``dst_blocks``, ``phase``: int64 ``[segments]``; a block's flat offset is its id times the stride.
    """

    src_rows: Ints
    dst_rows: Ints
    lengths: Ints
    src_stride: int
    dst_stride: int
    src_blocks: Ints
    dst_blocks: Ints
    phase: Ints

    @property
    def segment_bytes(self) -> Ints:
        """Bytes that each segment carries, int64 ``[segments]``."""
        return np.asarray(self.lengths.sum(axis=1)[self.phase])

    @property
    def nbytes(self) -> int:
        return int(self.segment_bytes.sum())

    def stream(self) -> tuple[Ints, Ints]:
        """Where the bytes lie in the packed stream, which is segment-major: base of each segment ``[segments]``
        and offset of each row within it ``[phases, rows]``."""
        sizes = self.segment_bytes
        rows = np.cumsum(self.lengths, axis=1) - self.lengths
        return np.cumsum(sizes) - sizes, rows

    def runs(self) -> Runs:
        """All (segment, row) pairs, row-major so that consecutive blocks meet, coalesced."""
        if len(self.src_rows) == 1:
            src = self.src_rows[0][:, None] + (self.src_blocks * self.src_stride)[None, :]
            dst = self.dst_rows[0][:, None] + (self.dst_blocks * self.dst_stride)[None, :]
            length = np.broadcast_to(self.lengths[0][:, None], src.shape)
        else:
            src = self.src_rows.T[:, self.phase] + (self.src_blocks * self.src_stride)[None, :]
            dst = self.dst_rows.T[:, self.phase] + (self.dst_blocks * self.dst_stride)[None, :]
            length = self.lengths.T[:, self.phase]
        return coalesce(src.ravel(), dst.ravel(), length.ravel())

    def split(self, max_bytes: int) -> Iterator[Sheet]:
        """Consecutive pieces of at most ``max_bytes`` each, by segments, and by rows where one segment is larger."""
        rows = self.lengths.max(axis=0)
        if int(rows.max(initial=0)) > max_bytes:
            raise PlanError(f"one run of {int(rows.max())} bytes does not fit a piece of {max_bytes} bytes")
        for a, b in _cuts(rows, max_bytes):
            part = replace(
                self, src_rows=self.src_rows[:, a:b], dst_rows=self.dst_rows[:, a:b], lengths=self.lengths[:, a:b]
            )
            for lo, hi in _cuts(part.segment_bytes, max_bytes):
                yield replace(
                    part, src_blocks=part.src_blocks[lo:hi], dst_blocks=part.dst_blocks[lo:hi], phase=part.phase[lo:hi]
                )


@dataclass(frozen=True)
class CopyPlan:
    """What to copy for one transfer between one producer rank and one consumer rank."""

    sheets: tuple[Sheet, ...]

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.sheets)

    def runs(self) -> Runs:
        """Materialised, coalesced runs for a back end that wants them. Both sides get the same list."""
        parts = [s.runs() for s in self.sheets]
        if len(parts) == 1:
            return parts[0]
        empty = np.empty(0, dtype=np.int64)
        return Runs(
            np.concatenate([p.src for p in parts] or [empty]),
            np.concatenate([p.dst for p in parts] or [empty]),
            np.concatenate([p.length for p in parts] or [empty]),
        )

    def split(self, max_bytes: int) -> Iterator[CopyPlan]:
        """Pieces of at most ``max_bytes``, in stream order; what staging slots and pipelines are filled with."""
        for sheet in self.sheets:
            for piece in sheet.split(max_bytes):
                yield CopyPlan((piece,))


class Planner:
    """Plans copies from ``src`` into ``dst`` for the claimed layers and heads.

    Construction checks the claims (``Incompatible``). ``plan`` may be called from any one thread at a time;
    templates are cached inside.
    """

    def __init__(self, src: Cache, dst: Cache, claims: Sequence[Claim]) -> None:
        check_claims(src, dst, claims)
        self._src, self._dst = src, dst
        pairs = _fuse([_Pair.of(src, dst, c) for c in claims])
        self._classes: dict[tuple[int, int], dict[tuple[int, int], list[_Pair]]] = {}
        for p in pairs:
            groups = self._classes.setdefault((p.src_group, p.dst_group), {})
            groups.setdefault((p.src_stride, p.dst_stride), []).append(p)
        self._templates: dict[tuple[Any, ...], list[tuple[Ints, Rows]]] = {}

    def plan(
        self, src_blocks: Sequence[Sequence[int] | Ints], dst_blocks: Sequence[Sequence[int] | Ints],
        start: int, tokens: int,
    ) -> CopyPlan:
        """Join two sets of block tables, one table per group of each side (position = index, -1 = null).

        Moves the tokens ``[start, tokens)`` into every destination block that is not null. Raises ``PlanError`` when
        a wanted token has no source block (a window group may lack what lies before its window), when a block id
        is outside the cache, or when ``start`` cuts an opaque block.
        """
        sheets: list[Sheet] = []
        for (sg, dg), classes in self._classes.items():
            if sg >= len(src_blocks) or dg >= len(dst_blocks):
                raise PlanError(f"no block table for group {max(sg, dg)}")
            segments = self._segments(
                sg, dg, np.asarray(src_blocks[sg], np.int64), np.asarray(dst_blocks[dg], np.int64), start, tokens
            )
            for strides, pairs in classes.items():
                sheets += self._sheets((sg, dg, *strides), pairs, segments)
        return CopyPlan(tuple(sheets))

    def _segments(
        self, sg: int, dg: int, src: Ints, dst: Ints, start: int, tokens: int
    ) -> tuple[Ints, Ints, Ints, Ints]:
        """(source blocks, destination blocks, phase of each, phases as rows of (src token, dst token, count))."""
        group, bs, bd = self._dst.groups[dg], self._src.groups[sg].block_tokens, self._dst.groups[dg].block_tokens
        if group.kind == "state":
            at_s = at_d = np.arange(len(dst))
            phase, phases = np.zeros(len(dst), np.int64), np.array([[0, 0, bd]], np.int64)
            needed = np.ones(len(dst), dtype=bool)
        else:
            if not 0 <= start <= tokens or len(dst) * bd < tokens:
                raise PlanError(f"group {dg}: tokens [{start}, {tokens}) do not fit a table of {len(dst)} x {bd} tokens")
            lo, count = _cut_tokens(start, tokens, bs, bd)
            at_s, at_d = lo // bs, lo // bd
            phase, phases = _phases(lo % bs, lo % bd, count, bs, bd)
            needed = lo + count > tokens - group.window + 1 if group.kind == "window" else np.ones(len(lo), dtype=bool)
            opaque = any(p.opaque for ps in self._classes[sg, dg].values() for p in ps)
            if opaque and start % bd and tokens > start:
                raise PlanError(f"group {dg}: start {start} cuts a block of {bd} tokens whose tokens are opaque")
        wanted = dst[at_d] >= 0
        have = np.full(len(at_s), -1, np.int64)
        inside = at_s < len(src)
        have[inside] = src[at_s[inside]]
        missing = np.flatnonzero(wanted & needed & (have < 0))
        if len(missing):
            raise PlanError(f"group {dg}: the producer has no block at position {int(at_s[missing[0]])} that is wanted")
        keep = wanted & (have >= 0)
        return have[keep], dst[at_d[keep]], phase[keep], phases

    def _sheets(
        self, key: tuple[int, int, int, int], pairs: list[_Pair], segments: tuple[Ints, Ints, Ints, Ints]
    ) -> Iterator[Sheet]:
        src_blocks, dst_blocks, phase, phases = segments
        if not len(src_blocks):
            return
        for blocks, limit, side in (
            (src_blocks, min(p.src_limit for p in pairs), "source"),
            (dst_blocks, min(p.dst_limit for p in pairs), "destination"),
        ):
            if int(blocks.min()) < 0 or int(blocks.max()) >= limit:
                raise PlanError(f"{side} block {int(blocks.max())} is outside the cache's {limit} blocks")
        _, _, src_stride, dst_stride = key
        for members, (src, dst, length) in self._template(key, pairs, phases):
            if len(members) == len(phases):
                yield Sheet(src, dst, length, src_stride, dst_stride, src_blocks, dst_blocks, phase)
                continue
            where = np.full(len(phases), -1, np.int64)
            where[members] = np.arange(len(members))
            mine = where[phase]
            pick = mine >= 0
            if pick.any():
                yield Sheet(src, dst, length, src_stride, dst_stride, src_blocks[pick], dst_blocks[pick], mine[pick])

    def _template(
        self, key: tuple[int, int, int, int], pairs: list[_Pair], phases: Ints
    ) -> list[tuple[Ints, Rows]]:
        """Row tables for these phases, those with equally many rows stacked: [(phase indices, rows [phases, rows])]."""
        full_key = (*key, phases.tobytes())
        found = self._templates.get(full_key)
        if found is None:
            rows = [_rows(pairs, *(int(x) for x in p)) for p in phases]
            by_count: dict[int, list[int]] = {}
            for i, r in enumerate(rows):
                by_count.setdefault(len(r[0]), []).append(i)
            found = [
                (
                    np.array(members, np.int64),
                    (
                        np.stack([rows[i][0] for i in members]),
                        np.stack([rows[i][1] for i in members]),
                        np.stack([rows[i][2] for i in members]),
                    ),
                )
                for members in by_count.values()
            ]
            if len(self._templates) >= 512:  # partial last blocks make at most one entry a token count
                self._templates.clear()
            self._templates[full_key] = found
        return found


@dataclass(frozen=True)
class _Pair:
    """One claim resolved to numbers; offsets are int64 ``[layers]`` and already at the first claimed head."""

    src_group: int
    dst_group: int
    src_stride: int
    dst_stride: int
    src_limit: int
    dst_limit: int
    src_offsets: Ints
    dst_offsets: Ints
    heads: int
    src_head: int
    dst_head: int
    src_token: int
    dst_token: int
    opaque: bool
    unit: int

    @classmethod
    def of(cls, src: Cache, dst: Cache, claim: Claim) -> _Pair:
        s, d = src.views[claim.src_view], dst.views[claim.dst_view]
        s_at, d_at = dict(zip(s.layers, s.offsets, strict=True)), dict(zip(d.layers, d.offsets, strict=True))
        s_off = np.array([s_at[name] for name in claim.layers], np.int64)
        d_off = np.array([d_at[name] for name in claim.layers], np.int64)
        heads, s_head, d_head = 1, 0, 0
        if s.heads is not None and d.heads is not None and s.heads.stride is not None and d.heads.stride is not None:
            heads, s_head, d_head = claim.head_hi - claim.head_lo, s.heads.stride, d.heads.stride
            s_off += (claim.head_lo - s.heads.start) * s_head
            d_off += (claim.head_lo - d.heads.start) * d_head
        return cls(
            s.group, d.group, s.block_stride, d.block_stride, s.blocks, d.blocks, s_off, d_off, heads, s_head, d_head,
            s.token_stride or 0, d.token_stride or 0, s.token_stride is None, s.unit,
        )


def _fuse(pairs: list[_Pair]) -> list[_Pair]:
    """Join planes that follow each other in the unit on both sides (K|V packed), so that templates stay short."""
    out: list[_Pair] = []
    for p in sorted(pairs, key=lambda p: (p.src_group, p.dst_group, int(p.dst_offsets[0]))):
        last = out[-1] if out else None
        if (
            last is not None
            and replace(last, src_offsets=p.src_offsets, dst_offsets=p.dst_offsets, unit=p.unit) == p
            and np.array_equal(last.src_offsets + last.unit, p.src_offsets)
            and np.array_equal(last.dst_offsets + last.unit, p.dst_offsets)
        ):
            out[-1] = replace(last, unit=last.unit + p.unit)
        else:
            out.append(p)
    return out


def _rows(pairs: list[_Pair], src_token: int, dst_token: int, count: int) -> Rows:
    """Template rows of one phase: for each layer, head and token the innermost contiguous bytes, coalesced."""
    parts: list[Rows] = []
    for p in pairs:
        unit = p.unit
        axes = [(p.heads, p.src_head, p.dst_head)]
        if not p.opaque:
            axes.append((count, p.src_token, p.dst_token))
        axes = sorted((a for a in axes if a[0] > 1), key=lambda a: a[2])
        while axes and axes[0][1] == axes[0][2] == unit:
            unit *= axes.pop(0)[0]
        src, dst = p.src_offsets + src_token * p.src_token, p.dst_offsets + dst_token * p.dst_token
        for n, s, d in reversed(axes):
            step = np.arange(n, dtype=np.int64)
            src = (src[:, None] + step * s).ravel()
            dst = (dst[:, None] + step * d).ravel()
        parts.append((src, dst, np.full(len(src), unit, np.int64)))
    src, dst, length = (np.concatenate([p[i] for p in parts]) for i in range(3))
    order = np.argsort(dst, kind="stable")
    r = coalesce(src[order], dst[order], length[order])
    return r.src, r.dst, r.length


def coalesce(src: Ints, dst: Ints, length: Ints) -> Runs:
    """Merge neighbours (in the given order) that continue each other on both sides."""
    if len(src) == 0:
        return Runs(src, dst, np.ascontiguousarray(length))
    step = length[:-1]
    joint = (src[1:] - src[:-1] == step) & (dst[1:] - dst[:-1] == step)
    if not joint.any():
        return Runs(src, dst, np.ascontiguousarray(length))
    first = np.flatnonzero(np.concatenate(([True], ~joint)))
    last = np.append(first[1:], len(src)) - 1
    return Runs(src[first], dst[first], src[last] + length[last] - src[first])


def _cut_tokens(start: int, tokens: int, bs: int, bd: int) -> tuple[Ints, Ints]:
    """Cut ``[start, tokens)`` at the block borders of both sides: first token and count of each segment."""
    if tokens <= start:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    edges = [np.arange(start // b + 1, -(-tokens // b), dtype=np.int64) * b for b in {bs, bd}]
    inner = edges[0] if len(edges) == 1 else np.union1d(edges[0], edges[1])
    cuts = np.concatenate(([start], inner, [tokens]))
    return cuts[:-1], np.diff(cuts)


def _phases(src_token: Ints, dst_token: Ints, count: Ints, bs: int, bd: int) -> tuple[Ints, Ints]:
    """Number the ways in which blocks overlap. They repeat with the common period of both block sizes, so the
    distinct ones are among the first period's segments and the last segment."""
    if not len(count):
        return count, np.empty((0, 3), np.int64)
    code = (src_token * bd + dst_token) * (min(bs, bd) + 1) + count
    period = (bs + bd) // gcd(bs, bd) + 2
    kinds, at = np.unique(np.append(code[:period], code[-1]), return_index=True)
    at = np.where(at == min(period, len(code)), len(code) - 1, at)
    return np.searchsorted(kinds, code), np.stack([src_token[at], dst_token[at], count[at]], axis=1)


def _cuts(sizes: Ints, limit: int) -> Iterator[tuple[int, int]]:
    """Split a list of sizes into consecutive ranges whose sums stay within ``limit`` (at least one element each)."""
    ends, lo = np.cumsum(sizes), 0
    while lo < len(sizes):
        base = int(ends[lo - 1]) if lo else 0
        hi = max(lo + 1, int(np.searchsorted(ends, base + limit, side="right")))
        yield lo, hi
        lo = hi
