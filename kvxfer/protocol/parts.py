"""Parts: how a transfer is cut by tokens, and which block ids the announcement of each part carries."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import lcm
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from kvxfer.config import SLOTS
from kvxfer.geometry import HOST, Cache, CopyPlan, Planner, Region
from kvxfer.memory import sample
from kvxfer.protocol.values import LinkInfo, PartRef
from kvxfer.values import BlockTable

Bands = tuple[int, int]
"""The first of some bands of layers, and the one after the last (``kvxfer.geometry.bands``)."""

MIN_PIECE = 8 << 20
"""The least bytes of a piece, below which its fixed costs show; or a quarter of a slot if that is more, because slots are sized for the
link."""
CHECKED, MIN_CHECKED = 4, 16 << 20
"""The number of parts that a large one is cut into if parts are hashed, and the least bytes of each to be worth its messages."""
HOST_BYTES, DEVICE_BYTES = 32 << 20, 512 << 20
"""The most bytes of a part, by where it lies: these take the link some milliseconds, far more than a part or a batch costs."""
AHEAD = 2
"""The most parts of a transfer in flight when sending: while one ends, the next moves, and other transfers on the link wait for
these only. (Reads and writes are cut by the side that submits them; for sends both sides must agree.)"""
HOST_PIECES, DEVICE_PIECES = 2, 1
"""The number of pieces that a small part is cut into, by where it lies. In host memory two, so that packing, moving and unpacking
overlap. A device packs a part in a fraction of the time that a piece costs threads on both sides (docs/decisions.md, 0016)."""


class Span(NamedTuple):
    """What a part of a transfer holds: tokens ``[lo, hi)`` of the layers in these bands, or of all layers."""

    lo: int
    hi: int
    bands: Bands | None = None


def plan_part(
    planner: Planner,
    src: BlockTable,
    dst: BlockTable,
    start: int,
    tokens: int,
    lo: int,
    hi: int,
    final: bool,
    bands: Bands | None = None,
    tail: bool = False,
) -> CopyPlan:
    """Return the plan of the part that holds tokens ``[lo, hi)`` of these bands, the same on both sides.

    Groups of kind ``full`` move those tokens; ``window`` and ``state`` groups move whole with the final part,
    because an engine gives their blocks up while it computes.

    ``tail``: whether the block that holds the last wanted token may be written to its end. Only a part up to that token may do
    so: what another part has brought behind its own end stays as it is.

    Raises:
        PlanError: The block tables do not join, or the part lies outside what is wanted.
    """
    lo, hi = max(lo, start), min(hi, tokens)
    tail = tail and hi == tokens
    of = planner if bands is None else planner.of(*bands)
    if planner.all_full:
        return of.plan(src, dst, lo, max(lo, hi), tail)
    plan = of.plan(src, _only(planner.dst, dst, full=True), lo, max(lo, hi), tail)
    if final:
        plan += planner.plan(src, _only(planner.dst, dst, full=False), start, tokens, tail)
    return plan


def _only(cache: Cache, table: BlockTable, *, full: bool) -> BlockTable:
    """Return the table with the groups of the other sort blanked out."""
    return BlockTable(
        tuple(row if (g.kind == "full") == full else b"" for g, row in zip(cache.groups, table.rows, strict=False))
    )


def carried(planner: Planner, blocks: BlockTable, span: Span, final: bool) -> BlockTable:
    """Return the part of a producer's block table that the announcement of a part carries (``PartReady.blocks``)."""
    if _whole(planner, span.lo, final):
        return blocks
    return blocks.cut([(span.lo // group.block_tokens, group.blocks(span.hi)) for group in planner.src.groups])


def placed(planner: Planner, blocks: BlockTable, lo: int, final: bool) -> BlockTable:
    """Return the blocks that the announcement of a part carried as a block table with each block at its position.

    ``lo``: the first token of the part, or the end of what is wanted if that comes before. ``final``: whether it is the last part.
    """
    if _whole(planner, lo, final):
        return blocks
    return blocks.behind([lo // group.block_tokens for group in planner.src.groups])


def _whole(planner: Planner, lo: int, final: bool) -> bool:
    """Return whether the announcement of a part carries whole rows: it is the only part, or some groups move whole with it."""
    return final and (not lo or not planner.all_full)


def reached(spans: Collection[Span], start: int, bands: int) -> int:
    """Return the largest ``tokens`` for which the union of spans holds ``[start, tokens)`` in each of ``bands`` bands."""
    if {span.bands for span in spans} == {None}:
        return _reached(spans, start)
    return min(
        _reached([s for s in spans if s.bands is None or s.bands[0] <= band < s.bands[1]], start)
        for band in range(bands)
    )


def _reached(spans: Iterable[Span], start: int) -> int:
    tokens = start
    for lo, hi, _ in sorted(spans, key=itemgetter(0, 1)):
        if lo > tokens:
            break
        tokens = max(tokens, hi)
    return tokens


def lacking(sent: Sequence[int], ready: Sequence[int]) -> list[Span]:
    """Return what is ready of each band and has not been sent: bands that lack the same tokens go together.

    Args:
        sent: For each band, the token up to which it has been sent.
        ready: For each band, the token up to which it is ready.
    """
    spans: list[Span] = []
    for band, (lo, hi) in enumerate(zip(sent, ready, strict=True)):
        last = spans[-1] if spans else None
        if last is not None and last.bands is not None and (last.lo, last.hi, last.bands[1]) == (lo, hi, band):
            spans[-1] = Span(lo, hi, (last.bands[0], band + 1))
        elif hi > lo:
            spans.append(Span(lo, hi, (band, band + 1)))
    whole = (0, len(sent))
    return [Span(span.lo, span.hi) if span.bands == whole else span for span in spans]


def on_host(regions: Iterable[Region]) -> bool:
    """Return whether all of this memory is the host's."""
    return all(region.device == HOST for region in regions)


def most_bytes(regions: Iterable[Region]) -> int:
    """Return the most bytes of a part in this memory, so that short transfers get their turn beside long ones."""
    return HOST_BYTES if on_host(regions) else DEVICE_BYTES


def cut(span: Span, plan: CopyPlan, info: LinkInfo) -> list[Span]:
    """Return the parts into which a span with this plan is cut, which may be the span itself.

    Cuts fall between the producer's blocks, which moves best; or within them if they are longer than a part, as with one block
    for each request. What a CPU hashes in full is cut into several parts, so that one is hashed while the next moves; a GPU
    hashes a part faster than a message travels. What is sent and received has parts of bounded size, staged or not.
    """
    if info.integrity != "full" and info.mode != "sendrecv":
        return [span]
    host = on_host(info.planner.src.regions)
    parts = min(CHECKED, plan.nbytes // MIN_CHECKED) if host and info.integrity == "full" else 1
    if info.mode == "sendrecv":
        most = most_bytes(info.planner.src.regions)
        if piece_bytes(plan, info):
            # As much as staging memory holds. If that is host memory, whose link is slower than a GPU's, its slots are shorter.
            most = min(most, max(HOST_BYTES, SLOTS * info.piece_bytes))
        parts = max(parts, -(-plan.nbytes // most))
    if parts < 2:
        return [span]
    lo, hi, bands = span
    blocks = lcm(*(g.block_tokens for g in info.planner.src.groups if g.kind == "full"))
    step = blocks if blocks * parts <= hi - lo else info.planner.indivisible
    inner = {(lo + (hi - lo) * i // parts) // step * step for i in range(1, parts)}
    ends = [*sorted(end for end in inner if lo < end < hi), hi]
    return [Span(*each, bands) for each in zip([lo, *ends[:-1]], ends, strict=True)] if len(ends) > 1 else [span]


def to_hash(plan: CopyPlan, info: LinkInfo, ref: PartRef) -> CopyPlan | None:
    """Return what of a part is hashed, the same on both sides; ``None`` for nothing."""
    if info.integrity == "off" or not plan.nbytes:
        return None
    return plan if info.integrity == "full" else sample(plan, ref.attempt + ref.part)


def piece_bytes(plan: CopyPlan, info: LinkInfo) -> int:
    """Return the size of the packed pieces in which a part goes staged because its rows are short, or 0 if its runs go direct."""
    rows = plan.rows
    if not rows or plan.nbytes >= info.stage_below * rows:
        return 0
    longest = max(int(np.maximum.reduce(s.counts)) * s.pattern.unit for s in plan.copies)
    pieces = HOST_PIECES if on_host(info.planner.src.regions) else DEVICE_PIECES
    return min(info.piece_bytes, max(MIN_PIECE, info.piece_bytes // 4, longest, plan.nbytes // pieces))
