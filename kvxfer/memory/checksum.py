"""A position-keyed 64-bit checksum of KV cache content.

**What it is.** The content of a plan is a set of *units*: the contiguous bytes of one layer and plane, one head and one
token (where heads or tokens are opaque, of all that one page holds together). A unit has a *position*, (layer name,
plane, model's head, token of the request), which no layout, block size, block id, tensor-parallel or pipeline split
changes. Its bytes, as little-endian 32-bit words ``w[0], w[1], …`` (the last filled up with zeros), give

    digest = sum over i of  w[i] * k[i]                           k[i] of 64 bits, odd, as if drawn at random
    value  = mix((digest + length * LENGTH) ^ key(position))      mix: the finaliser of splitmix64

and the checksum is the sum of all values, everything modulo 2**64. Both sides read their own memory by their own
strides; only which units were moved is taken from the plan, never where the other side keeps them.

**It adds up.** The checksum of a whole is the sum of its parts' checksums, however it is cut: by token spans, layers,
heads, ranks or increments; and it does not depend on the order in which they are read.

**What it detects.** Damage changes some words by ``d[i]`` and goes unnoticed if the sum of ``d[i] * k[i]`` is 0. Each
``d[i]`` is less than 2**32, so it is a multiple of no power of two above 2**31. A single word always changes the digest,
because ``k[i]`` is odd. Of several words, whatever their damage, take one: once all other keys are drawn, at most one in
2**32 of its own keys gives 0. Because keys are twice as wide as what they multiply, no shape of damage can hide: not the
same in each word, not in its top bits only, not everywhere. ``mix`` is a bijection, so a single damaged unit whose digest
differs is always noticed; several cancel with a chance of about 2**-64. Units that are exchanged, moved to another token,
head, layer or plane, missing, or there twice are damaged units in this sense, all-zero content included: the value of a
unit depends on where it stands. So the checksum catches stale blocks, half-written blocks, wrong block ids, wrong
strides, bytes lost or reordered by a transport, and plans that the two sides derived differently.

**What it does not.** It is no defence against a peer that lies: the keys are public and sums can be
steered; authenticate the peer for that. It says nothing of bytes outside the units (padding, tokens not moved), of two
sides that both hold the same wrong content, or of anything that happens after it was read.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.fence import Fence
from kvxfer.geometry import CopyPattern, CopyPlan, LogicalCopy, ViewGroup
from kvxfer.memory.fence import Done
from kvxfer.memory.regions import Bytes, Side
from kvxfer.memory.rows import Keys, Rows, mix, sum_rows

__all__ = [
    "LENGTH",
    "Checksum",
    "Sum",
    "constants",
    "fine",
    "logical_copies",
    "next_token",
    "row_keys",
    "sample",
    "spans",
    "sum_of_packed",
    "word_keys",
]

HEAD, TOKEN, LENGTH = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xD6E8FEB86659FD93
"""Odd constants: a position's key is its cell's plus its head times one plus its token times another."""

SAMPLE = 16
"""A sample holds one in this many segments."""


class Checksum(ABC):
    """A checksum that is being computed.

    Attributes:
        fence: Passes when the value is known.
    """

    fence: Fence

    @property
    @abstractmethod
    def value(self) -> int:
        """The checksum, unsigned, 64 bits. Blocks until ``fence`` has passed."""


class Sum(Checksum):
    """A checksum that is known already."""

    fence = Done()

    def __init__(self, value: int) -> None:
        self._value = value

    @property
    def value(self) -> int:
        return self._value


@cache
def word_keys(words: int) -> Keys:
    """Return ``k[0]`` to ``k[words - 1]``. Ask for powers of two, so that few tables are made."""
    return mix(np.arange(1, words + 1, dtype=np.uint64) * np.uint64(HEAD)) | np.uint64(1)


def cell_keys(view_group: ViewGroup) -> Keys:
    """Return the key of every (plane, layer) of a view group at head 0 and token 0, uint64 ``[cells]``."""
    out = np.empty(len(view_group.names), np.uint64)
    for i, (plane, layer) in enumerate(view_group.names):
        name = f"{len(plane)}:{plane}{layer}".encode()
        out[i] = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    return out


def fine(view_group: ViewGroup, tokens: int) -> CopyPattern:
    """Return the view group's pattern with nothing merged: a row is a unit, the axes are heads, then tokens."""
    axes = (view_group.heads, view_group.tokens(tokens))
    return CopyPattern(view_group.src_cells, view_group.dst_cells, axes, view_group.unit)


def next_token(view_group: ViewGroup) -> np.uint64:
    """Return what is added to a row's key for the next token of its segment."""
    return np.uint64(TOKEN * view_group.shared.step % (1 << 64))


def logical_copies(plan: CopyPlan) -> tuple[LogicalCopy, ...]:
    """Return a plan's logical copies.

    Raises:
        ValueError: The plan came without.
    """
    if plan.copies and not plan.logical:
        raise ValueError("a piece of a plan does not know the positions of its content")
    return plan.logical


def row_keys(view_group: ViewGroup, tokens: int) -> Keys:
    """Return the key of every row of ``fine(view_group, tokens)`` in a segment from token 0, uint64 ``[rows]``."""
    heads = np.arange(view_group.heads[0], dtype=np.uint64) + np.uint64(view_group.first_head)
    inner = heads[:, None] * np.uint64(HEAD) + np.arange(tokens, dtype=np.uint64) * next_token(view_group)
    return (cell_keys(view_group)[:, None] + inner.ravel()).ravel()


def spans(part: LogicalCopy, side: Side) -> Iterator[tuple[int, Ints, Keys]]:
    """Divide a logical copy by the length of its segments.

    Yields:
        Tokens in each segment, places of the segments on one side, and the key to add to those of their rows.
    """
    at = part.src_at if side == "source" else part.dst_at
    first = part.token.astype(np.uint64) * np.uint64(TOKEN)
    counts = np.flatnonzero(np.bincount(part.count)).tolist()
    for n in counts:
        here = slice(None) if len(counts) == 1 else part.count == n
        yield n, at[here], first[here]


def sample(plan: CopyPlan, seed: int) -> CopyPlan:
    """Choose some segments of a plan, to check these alone: one in ``SAMPLE`` of each logical copy, and at least one.

    The choice follows from ``seed`` and the plan, so both sides choose the same. The result is good for checksums only:
    it has no copies.
    """
    some = []
    for part in logical_copies(plan):
        n = len(part.token)
        which = slice(seed % min(SAMPLE, n), None, SAMPLE)
        some.append(
            LogicalCopy(part.view_group, part.src_at[which], part.dst_at[which], part.token[which], part.count[which])
        )
    return CopyPlan((), tuple(some))


def sum_of_packed(stream: Bytes, view_group: ViewGroup, tokens: int, first: Keys) -> int:
    """Return the sum of the values of segments whose units were packed, as ``fine`` has them, one after the other.

    ``first``: what to add to the keys of each segment, as from ``spans``.
    """
    keys, unit = row_keys(view_group, tokens), view_group.unit
    begins = np.arange(len(first), dtype=np.int64) * (len(keys) * unit)
    return sum_rows(Rows(stream, unit, begins, keys.shape, (unit,), keys, first), *constants(view_group))


def constants(view_group: ViewGroup) -> tuple[Keys, np.uint64]:
    """Return the factors of a unit's words, and what its length adds to the digest."""
    words = -(-view_group.unit // 4)
    return word_keys(1 << (words - 1).bit_length())[:words], np.uint64(view_group.unit * LENGTH % (1 << 64))
