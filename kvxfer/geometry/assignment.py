"""Assignments: which layers and heads of a producer's view go into a consumer's view, and whether that is possible."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.errors import KvxferError
from kvxfer.failures import FailureKind
from kvxfer.geometry.cache import Cache
from kvxfer.geometry.turns import Shared
from kvxfer.geometry.view import View


class Incompatible(KvxferError, ValueError):
    """The contents of two caches cannot be converted into one another; the message names both sides and the axis."""

    default = FailureKind.INCOMPATIBLE


MAX_ASSIGNMENTS, MAX_LAYERS = 1 << 10, 1 << 12
"""The most assignments of one rank, and layers named in them all together. Each plane of a layer is assigned once, or a few
times if its heads come from several replicas."""


class ShardAssignment(msgspec.Struct, frozen=True):
    """A rectangle of layers and global heads to copy from one view into another.

    Attributes:
        src_view: Index of the producer's view in its ``Cache.views``.
        dst_view: Index of the consumer's view in its ``Cache.views``.
        layers: Names of the layers, which both views hold.
        head_lo: First global head.
        head_hi: The head after the last.
    """

    src_view: int
    dst_view: int
    layers: Annotated[tuple[str, ...], Meta(max_length=MAX_LAYERS)]
    head_lo: int
    head_hi: int


def check_assignments(src: Cache, dst: Cache, assignments: Sequence[ShardAssignment]) -> None:
    """Refuse assignments that the two caches do not allow.

    It is safe for assignments that came from a peer: its cost grows with the number of assignments, layers and views, all
    of which are bounded.

    Raises:
        Incompatible: An assignment lies outside a cache, joins views of different planes or views that cannot be
            converted, cuts an opaque axis, or covers a (layer, plane, head) that another one covers already.
    """
    if len(assignments) > MAX_ASSIGNMENTS or sum(len(c.layers) for c in assignments) > MAX_LAYERS:
        raise Incompatible(
            f"{len(assignments)} assignments are more than {MAX_ASSIGNMENTS}, or name more than {MAX_LAYERS} layers together"
        )
    held = [frozenset(v.layers) for v in src.views], [frozenset(v.layers) for v in dst.views]
    taken: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for c in assignments:
        if not (0 <= c.src_view < len(src.views) and 0 <= c.dst_view < len(dst.views)):
            raise Incompatible(f"assignment names view {c.src_view} or {c.dst_view}, which does not exist")
        s, d = src.views[c.src_view], dst.views[c.dst_view]
        if s.plane != d.plane:
            raise Incompatible(
                f"plane: an assignment joins {s.plane!r} of the producer's {name(src)} with {d.plane!r} of the consumer's "
                f"{name(dst)}"
            )
        check_pair(src, s, dst, d)
        if not Shared(s.held, d.held).share:
            raise Incompatible(f"token: assignment {c} joins ranks that hold no token of plane {s.plane!r} in common")
        sides = (
            (s, held[0][c.src_view], "producer's " + name(src)),
            (d, held[1][c.dst_view], "consumer's " + name(dst)),
        )
        for v, layers, side in sides:
            lo, hi = head_range(v)
            if not lo <= c.head_lo < c.head_hi <= hi or not c.layers or not layers.issuperset(c.layers):
                raise Incompatible(f"assignment {c} leaves what the {side} holds of plane {v.plane!r}")
            if v.heads is not None and v.heads.stride is None and (c.head_lo, c.head_hi) != (lo, hi):
                raise Incompatible(f"head (opaque): assignment {c} cuts the heads of plane {v.plane!r} of the {side}")
        for layer in c.layers:
            cells = taken[c.dst_view, layer]
            i = bisect_right(cells, (c.head_lo, c.head_hi))
            if (i and cells[i - 1][1] > c.head_lo) or (i < len(cells) and cells[i][0] < c.head_hi):
                raise Incompatible(
                    f"layer {layer!r}, plane {d.plane!r}, heads [{c.head_lo}, {c.head_hi}) of the consumer's "
                    f"{name(dst)} are assigned twice from the producer's {name(src)}"
                )
            cells.insert(i, (c.head_lo, c.head_hi))


def head_range(view: View) -> tuple[int, int]:
    """Return the global heads ``[lo, hi)`` that a view holds; content without heads counts as one."""
    return (0, 1) if view.heads is None else (view.heads.start, view.heads.start + view.heads.count)


def name(cache: Cache) -> str:
    """Return the name of a rank in error messages."""
    return f"rank pp{cache.rank.pp}/tp{cache.rank.tp}"


def check_pair(src: Cache, s: View, dst: Cache, d: View) -> None:
    """Refuse two views of one plane whose units are not the same logical content.

    Raises:
        Incompatible: They are not; the message has the first axis or property in which they differ, with both values.
    """
    sg, dg = src.groups[s.group], dst.groups[d.group]
    pairs: list[tuple[str, object, object]] = [
        ("encoding", s.encoding, d.encoding),
        ("group kind", sg.kind, dg.kind),
        ("window", sg.window, dg.window),
        ("head (present or absent)", s.heads is not None, d.heads is not None),
        ("token (opaque or not)", _opacity(s.token_stride), _opacity(d.token_stride)),
    ]
    if s.token_stride is None and sg.kind != "state":
        pairs.append(("token (opaque): block tokens", sg.block_tokens, dg.block_tokens))
        pairs.append(("token (opaque): turns", _period(s), _period(d)))
    if s.heads is not None and d.heads is not None:
        pairs.append(("head total", s.heads.total, d.heads.total))
        pairs.append(("head (opaque or not)", _opacity(s.heads.stride), _opacity(d.heads.stride)))
        if s.heads.stride is None:
            pairs.append(("head (opaque): range", head_range(s), head_range(d)))
    pairs.append(("unit bytes", s.unit, d.unit))
    for axis, left, right in pairs:
        if left != right:
            raise Incompatible(
                f"{axis}: plane {s.plane!r} of the producer's {name(src)} has {left!r}, "
                f"of the consumer's {name(dst)} {right!r}"
            )


def _period(view: View) -> str:
    return f"{view.held.span} tokens of each of {view.held.count} ranks"


def _opacity(stride: int | None) -> str:
    return "opaque" if stride is None else "not opaque"
