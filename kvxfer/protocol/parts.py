"""Parts: how a transfer is cut by tokens, and what of the block tables each part carries."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

import numpy as np

from kvxfer.geometry import Cache, CopyPlan, Planner
from kvxfer.memory import sample
from kvxfer.protocol.values import LinkInfo, PartRef
from kvxfer.values import BlockTable

PIECE_LEAST = 8 << 20
"""Bytes of a piece below which its fixed costs show; half a slot, where that is more: slots are sized for the link."""
CHECKED, CHECKED_LEAST = 4, 16 << 20
"""Parts that a large one is cut into where parts are hashed, and bytes below which that is not worth the messages."""
HOST_PART, CUDA_PART = 32 << 20, 512 << 20
"""Bytes of a part that is sent and received, by where it lies: some milliseconds of its link, and far more than a part costs."""
AHEAD = 2
"""Parts of a transfer that are sent at once: while one ends, the next moves, and what comes to the link meanwhile waits for these
only. (What is read or written, each side cuts by itself; where both sides have a half, both have to know.)"""
DEPTH = 2
"""Pieces that a small part is cut into, so that packing, moving and unpacking overlap. No more: each costs threads on both
sides the time in which a fast link moves tens of MiB."""


def plan_part(
    planner: Planner, src: BlockTable, dst: BlockTable, start: int, tokens: int, lo: int, hi: int, final: bool
) -> CopyPlan:
    """Return the plan of the part that holds tokens ``[lo, hi)``, the same on both sides.

    Groups of kind ``full`` move those tokens; ``window`` and ``state`` groups move whole with the final part,
    because an engine gives their blocks up while it computes.

    Raises:
        PlanError: the block tables do not join, or the part lies outside what is wanted.
    """
    lo, hi = max(lo, start), min(hi, tokens)
    if planner.all_full:
        return planner.plan(src, dst, lo, max(lo, hi))
    plan = planner.plan(src, _only(planner.dst, dst, full=True), lo, max(lo, hi))
    if final:
        plan += planner.plan(src, _only(planner.dst, dst, full=False), start, tokens)
    return plan


def _only(cache: Cache, table: BlockTable, *, full: bool) -> BlockTable:
    """Return the table with the groups of the other sort blanked out."""
    return BlockTable(
        tuple(row if (g.kind == "full") == full else b"" for g, row in zip(cache.groups, table.rows, strict=False))
    )


def covered(spans: Iterable[tuple[int, int]], start: int, tokens: int) -> bool:
    """Return whether the union of token spans holds ``[start, tokens)``."""
    return reached(spans, start) >= tokens


def reached(spans: Iterable[tuple[int, int]], start: int) -> int:
    """Return the largest ``tokens`` for which the union of token spans holds ``[start, tokens)``."""
    tokens = start
    for lo, hi in sorted(spans):
        if lo > tokens:
            break
        tokens = max(tokens, hi)
    return tokens


def aligned(cache: Cache, tokens: int) -> int:
    """Return the largest count up to ``tokens`` that cuts no block of a full group."""
    step = lcm(*(g.block_tokens for g in cache.groups if g.kind == "full"))
    return tokens // step * step


def cuts(lo: int, hi: int, plan: CopyPlan, info: LinkInfo) -> list[int]:
    """Return where the parts end into which the tokens ``[lo, hi)`` are cut.

    What a host hashes in full goes in several parts, so that one is read while the next one moves. A GPU has hashed a part
    before a message comes through. What is sent and received goes in parts of bounded size.

    Args:
        lo: the first token.
        hi: the token after the last.
        plan: that of all these tokens.
        info: what is known of the link.
    """
    if info.integrity != "full" and info.mode != "sendrecv":
        return [hi]
    host = all(r.device == "cpu" for r in info.planner.src.regions)
    parts = min(CHECKED, plan.nbytes // CHECKED_LEAST) if host and info.integrity == "full" else 1
    if info.mode == "sendrecv" and not piece_bytes(plan, info):
        parts = max(parts, -(-plan.nbytes // (HOST_PART if host else CUDA_PART)))
    if parts < 2:
        return [hi]
    ends = {aligned(info.planner.src, lo + (hi - lo) * i // parts) for i in range(1, parts)}
    return [*sorted(end for end in ends if lo < end < hi), hi]


def to_hash(plan: CopyPlan, info: LinkInfo, ref: PartRef) -> CopyPlan | None:
    """Return what both sides hash of a part, the same on both, or ``None`` for nothing."""
    if info.integrity == "off" or not plan.nbytes:
        return None
    return plan if info.integrity == "full" else sample(plan, ref.attempt + ref.part)


def piece_bytes(plan: CopyPlan, info: LinkInfo) -> int:
    """Return the size of the packed pieces in which a part goes staged, or 0 when its runs go direct."""
    rows = plan.rows
    if not rows or plan.nbytes >= info.stage_below * rows:
        return 0
    longest = max(int(np.maximum.reduce(s.counts)) * s.pattern.unit for s in plan.copies)
    return min(info.piece_bytes, max(PIECE_LEAST, info.piece_bytes // 2, plan.nbytes // DEPTH, longest))
