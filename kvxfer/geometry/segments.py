"""Cut a span of tokens at the block borders of both sides, and look the blocks up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from kvxfer.errors import KvxferError
from kvxfer.geometry.turns import Shared
from kvxfer.values import BlockTable, Ints

Rows = BlockTable | Sequence[Sequence[int] | Ints]
"""A block table, or its rows as any sequences of ids."""


_FEW = 64
"""The most blocks of a span that counts as short."""


class PlanError(KvxferError, ValueError):
    """The block tables cannot be joined (a wanted token has no source, a table is short, a cut is not allowed)."""


class Cut(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Segments by position, before blocks are looked up: int64 ``[segments]`` each.

    Segments that end at or before ``needed`` may lack a source.
    """

    token: Ints  # first token of each segment (of a state: the token after which it stands, counted from 1)
    count: Ints  # tokens of each, ``step`` apart
    src_pos: Ints  # position of its block in the producer's table; -1 if it has none
    dst_pos: Ints  # position of its block in the consumer's table
    src_token: Ints  # its first token within the producer's block, of those that are there
    dst_token: Ints  # its first token within the consumer's block, of those that are there
    needed: int  # first token that must have a source
    step: int = 1  # tokens from one of a segment to the next


class Segments(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Segments that have a block on both sides: int64 ``[segments]`` each, named as in ``Cut``."""

    src_block: Ints
    dst_block: Ints
    dst_pos: Ints
    src_token: Ints
    dst_token: Ints
    token: Ints
    count: Ints


def least(values: Ints) -> int:
    """Return the least of one or more values; of a single one by looking at it, which takes a tenth of numpy's time."""
    return int(values[0] if len(values) == 1 else np.minimum.reduce(values))


def greatest(values: Ints) -> int:
    """Return the greatest of one or more values; see ``least``."""
    return int(values[0] if len(values) == 1 else np.maximum.reduce(values))


def cut_tokens(start: int, tokens: int, bs: int, bd: int, needed: int, most: int) -> Cut:
    """Cut the tokens ``[start, tokens)`` at the block borders of both sides, of ``bs`` tokens at the source and ``bd`` at the destination.

    ``needed``: the first token that must have a source. ``most``: tokens of a segment at most; blocks that are larger are cut at
    multiples of it.
    """
    short = tokens - start <= _FEW * min(bs, bd, most)
    return (_cut_short if short else _cut_any)(start, tokens, bs, bd, needed, most)


def _cut_any(start: int, tokens: int, bs: int, bd: int, needed: int, most: int) -> Cut:
    bounds = _bounds(start, tokens, {bs, bd, most} if most < min(bs, bd) else {bs, bd})
    token, count = bounds[:-1], bounds[1:] - bounds[:-1]
    src_pos = token // bs
    dst_pos = src_pos if bs == bd else token // bd
    src_token = token - src_pos * bs
    dst_token = src_token if bs == bd else token - dst_pos * bd
    for column in (token, count, src_pos, dst_pos, src_token, dst_token):
        column.setflags(write=False)  # it may be kept
    return Cut(token, count, src_pos, dst_pos, src_token, dst_token, needed)


_cut_short = lru_cache(maxsize=128)(_cut_any)
"""Short spans are cut alike again and again. What is kept of them is less than a MB."""


def _bounds(start: int, tokens: int, steps: set[int]) -> Ints:
    """Return ``start``, ``tokens`` and the multiples of these steps between them, in order."""
    edges = [
        np.arange(start // b, -(-tokens // b) + 1 if start < tokens else 0, dtype=np.int64) * b
        for b in steps
        if not any(b != smaller and b % smaller == 0 for smaller in steps)
    ]
    for each in edges:
        each[:1], each[-1:] = start, tokens
    bounds = edges[0]
    if len(edges) > 1 and start < tokens:
        bounds = np.concatenate(edges)
        bounds.sort(kind="stable")  # a few ascending lists, which this kind of sort merges
        bounds = bounds[np.flatnonzero(np.append(bounds[1:] != bounds[:-1], True))]
    return bounds


def cut_turns(start: int, tokens: int, bs: int, bd: int, needed: int, most: int, shared: Shared) -> Cut:
    """Cut those of the tokens ``[start, tokens)`` that two ranks share at the block borders of both; see ``cut_tokens``.

    A block's tokens are counted on all ranks that take turns.
    """
    src, dst, step = shared.src, shared.dst, shared.step
    most = min(most, bs, bd)
    if step > 1:
        bounds = _bounds(start, tokens, {bs, bd, most * step})
        at = -((shared.first - bounds) // step)  # of the shared tokens, the first that is not before
        held = at[1:] > at[:-1]
        token, count = (at[:-1] * step + shared.first)[held], (at[1:] - at[:-1])[held]
    else:
        bounds = _bounds(start, tokens, {bs, bd, most, *(of.span for of in (src, dst) if of.count > 1)})
        token, count = bounds[:-1], bounds[1:] - bounds[:-1]
        held = (token // src.span % src.count == src.index) & (token // dst.span % dst.count == dst.index)
        token, count = token[held], count[held]
    src_pos, dst_pos = token // bs, token // bd
    src_token, dst_token = (
        token // (of.span * of.count) * of.span + token % of.span - pos * (block // of.count)
        for of, pos, block in ((src, src_pos, bs), (dst, dst_pos, bd))
    )
    return Cut(token, count, src_pos, dst_pos, src_token, dst_token, needed, step)


def cut_states(start: int, tokens: int, bs: int, bd: int) -> Cut:
    """Make one segment for each state after a token in ``(start, tokens]`` that the destination has a place for."""
    dst_pos = np.arange(start // bd, -(-tokens // bd) if start < tokens else 0, dtype=np.int64)
    after = np.minimum((dst_pos + 1) * bd, tokens)
    src_pos = (after - 1) // bs
    src_pos[np.minimum((src_pos + 1) * bs, tokens) != after] = -1
    zero = np.zeros(len(after), np.int64)
    return Cut(after, zero + 1, src_pos, dst_pos, zero, zero, start)


def join(src: Ints, dst: Ints, cut: Cut, group: int) -> Segments:
    """Look the blocks of both tables up.

    Args:
        src: Block ids of the producer's table, int64.
        dst: Block ids of the consumer's table, int64; negative for a null block, which is left out.
        cut: The segments.
        group: Index of the consumer's group, for errors.

    Raises:
        PlanError: A segment that is wanted and needed has no source, or a wanted block would be filled in part.
    """
    dst_block = dst[cut.dst_pos]
    columns = cut.dst_pos, cut.src_token, cut.dst_token, cut.token, cut.count
    if not len(dst_block):
        return Segments(dst_block, dst_block, *columns)
    if least(cut.src_pos) >= 0 and greatest(cut.src_pos) < len(src):
        src_block = src[cut.src_pos]
        if least(src_block) >= 0 and least(dst_block) >= 0:
            return Segments(src_block, dst_block, *columns)
    else:
        src_block = np.full(len(dst_block), -1, np.int64)
        inside = (cut.src_pos >= 0) & (cut.src_pos < len(src))
        src_block[inside] = src[cut.src_pos[inside]]
    wanted = dst_block >= 0
    keep = wanted & (src_block >= 0)
    lost = wanted & (src_block < 0) & (cut.token + (cut.count - 1) * cut.step >= cut.needed)
    if lost.any():
        at = int(np.argmax(lost))
        raise PlanError(
            f"group {group}: the producer has no block for token {int(cut.token[at])} (position "
            f"{int(cut.src_pos[at])} of a table of {len(src)}), which the consumer wants at position "
            f"{int(cut.dst_pos[at])}"
        )
    half = np.isin(dst_block, dst_block[wanted & (src_block < 0)]) & keep
    if half.any():
        # Its consumer would take it for whole, and hand it to a request that attends to more of it than this one.
        at = int(np.argmax(half))
        raise PlanError(
            f"group {group}: the producer has only tokens from {int(cut.token[at])} on of the block that the consumer wants at "
            f"position {int(cut.dst_pos[at])}, and has given up those before, which are out of the window. Choose a block size "
            "for the consumer that divides the producer's"
        )
    return Segments(*(c[keep] for c in (src_block, dst_block, *columns)))
