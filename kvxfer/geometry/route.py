"""Who reads what from whom: layers and heads intersected between two engines of any TP and PP.

Each consumer rank claims, of every plane it holds, the (layer, head) cells from producer ranks so that each cell
is claimed once. Where producers hold replicas (MLA, or more ranks than KV heads) the consumer's own position
decides which replica it reads, so that readers spread. A producer that nobody would read from is still given
one reader with an empty claim: that reader's word is what lets the producer free its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvxfer.geometry.cache import Cache, Rank, View

__all__ = ["Claim", "Incompatible", "Route", "check_claims", "route"]


class Incompatible(ValueError):
    """Two caches whose contents cannot be converted into one another; the text names both sides and the axis."""


class Claim(msgspec.Struct, frozen=True):
    """A rectangle of layers and global heads ``[head_lo, head_hi)`` to copy from one view into another."""

    src_view: int
    dst_view: int
    layers: tuple[str, ...]
    head_lo: int
    head_hi: int


class Route(msgspec.Struct, frozen=True):
    """For one consumer rank: its claims on each producer rank it must contact, and each one's reader count."""

    claims: dict[Rank, tuple[Claim, ...]]
    readers: dict[Rank, int]


def route(producers: Sequence[Cache], consumers: Sequence[Cache]) -> dict[Rank, Route]:
    """Assign every consumer rank its claims on the producer ranks.

    Deterministic in its arguments (ranks are sorted), so that all ranks agree without talking.
    Raises ``Incompatible`` when some cell of a consumer's cache has no convertible source.
    """
    sources = sorted(producers, key=lambda c: c.rank)
    sinks = sorted(consumers, key=lambda c: c.rank)
    claims: dict[Rank, dict[Rank, tuple[Claim, ...]]] = {}
    for i, sink in enumerate(sinks):
        turned = [sources[(i + k) % len(sources)] for k in range(len(sources))]
        claims[sink.rank] = _claims_of(sink, turned)
    for i, source in enumerate(sources):
        if not any(source.rank in of for of in claims.values()):
            claims[sinks[i % len(sinks)].rank][source.rank] = ()
    readers = {s.rank: sum(s.rank in of for of in claims.values()) for s in sources}
    return {r: Route(claims=of, readers={p: readers[p] for p in of}) for r, of in claims.items()}


def _claims_of(sink: Cache, sources: Sequence[Cache]) -> dict[Rank, tuple[Claim, ...]]:
    found: dict[Rank, list[Claim]] = {}
    for d, view in enumerate(sink.views):
        lo, hi = _head_range(view)
        open_cells = np.ones((len(view.layers), hi - lo), dtype=bool)
        row = {layer: i for i, layer in enumerate(view.layers)}
        for source in sources:
            for s, other in enumerate(source.views):
                if other.plane != view.plane:
                    continue
                layers = [name for name in other.layers if name in row]
                if not layers:
                    continue
                _check_pair(source, other, sink, view)
                a, b = max(lo, _head_range(other)[0]), min(hi, _head_range(other)[1])
                if a >= b:
                    continue
                rows = [row[name] for name in layers]
                free = open_cells[rows, a - lo : b - lo]
                if not free.any():
                    continue
                keep, cols = free.any(axis=1), np.flatnonzero(free.any(axis=0))
                first, last = int(cols[0]), int(cols[-1]) + 1
                if not free[keep][:, first:last].all():
                    raise Incompatible(
                        f"head axis: the heads that {_name(source)} holds of plane {view.plane!r} overlap other ranks' "
                        f"heads unevenly for {_name(sink)}; give every rank one contiguous head range"
                    )
                taken = [r for r, k in zip(rows, keep, strict=True) if k]
                open_cells[np.ix_(taken, range(a - lo + first, a - lo + last))] = False
                names = tuple(view.layers[r] for r in taken)
                found.setdefault(source.rank, []).append(Claim(s, d, names, a + first, a + last))
        if open_cells.any():
            r, h = (int(x) for x in np.argwhere(open_cells)[0])
            raise Incompatible(
                f"layer or plane axis: no producer rank holds layer {view.layers[r]!r}, plane {view.plane!r}, "
                f"head {lo + h} that {_name(sink)} needs; the producer has planes "
                f"{sorted({v.plane for c in sources for v in c.views})}"
            )
    return {rank: tuple(of) for rank, of in found.items()}


def check_claims(src: Cache, dst: Cache, claims: Sequence[Claim]) -> None:
    """Raise ``Incompatible`` unless ``claims`` (from a peer) lie within both caches and join convertible views."""
    for c in claims:
        if not (0 <= c.src_view < len(src.views) and 0 <= c.dst_view < len(dst.views)):
            raise Incompatible(f"claim names view {c.src_view} or {c.dst_view}, which does not exist")
        s, d = src.views[c.src_view], dst.views[c.dst_view]
        _check_pair(src, s, dst, d)
        for v, side in ((s, src), (d, dst)):
            lo, hi = _head_range(v)
            if not (lo <= c.head_lo < c.head_hi <= hi) or not c.layers or not set(c.layers) <= set(v.layers):
                raise Incompatible(f"claim {c} leaves what {_name(side)} holds of plane {v.plane!r}")


def _head_range(view: View) -> tuple[int, int]:
    return (0, 1) if view.heads is None else (view.heads.start, view.heads.start + view.heads.count)


def _name(cache: Cache) -> str:
    return f"rank pp{cache.rank.pp}/tp{cache.rank.tp}"


def _check_pair(src: Cache, s: View, dst: Cache, d: View) -> None:
    """Refuse a pair of views of one plane and layer whose units are not the same logical content."""
    sg, dg = src.groups[s.group], dst.groups[d.group]
    pairs: list[tuple[str, object, object]] = [
        ("encoding", s.encoding, d.encoding),
        ("group kind", sg.kind, dg.kind),
        ("window", sg.window, dg.window),
        ("head (present or absent)", s.heads is None, d.heads is None),
        ("token (opaque or not)", s.token_stride is None, d.token_stride is None),
        ("unit bytes", s.unit, d.unit),
    ]
    if s.token_stride is None:
        pairs.append(("token (opaque): block tokens", sg.block_tokens, dg.block_tokens))
    if s.heads is not None and d.heads is not None:
        pairs.append(("head total", s.heads.total, d.heads.total))
        pairs.append(("head (opaque or not)", s.heads.stride is None, d.heads.stride is None))
        if s.heads.stride is None:
            opaque = [(h.start, h.count) for h in (s.heads, d.heads)]
            overlap = max(opaque[0][0], opaque[1][0]) < min(sum(opaque[0]), sum(opaque[1]))
            if overlap:
                pairs.append(("head (opaque): range", opaque[0], opaque[1]))
    for axis, left, right in pairs:
        if left != right:
            raise Incompatible(
                f"{axis}: plane {s.plane!r} of the producer's {_name(src)} has {left!r}, "
                f"of the consumer's {_name(dst)} {right!r}"
            )
