"""Which groups of a cache share their blocks, so that a block id means the same memory in all of them.

Engines that have one pool of blocks for several groups lay the groups over each other, and hand each block to one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

from kvxfer.errors import ArgumentError
from kvxfer.geometry.cache import Cache
from kvxfer.geometry.overlap import Strided, first_overlap

_Piece = tuple[int, int, int, Strided]
"""First byte of a layer's block 0, the byte after its last, its group, and the layer with block 0 alone."""


def block_spaces(cache: Cache) -> dict[int, int]:
    """Return the block space of each group that has a view: the same number for groups that share their blocks.

    Two groups do if layers of theirs have the same block stride, and blocks 0 that have bytes in common. The cache must have
    passed ``Cache.check``.
    """
    space = {v.group: v.group for v in cache.views}
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    for v in cache.views:
        tokens = cache.groups[v.group].block_tokens
        nbytes = v.extent(tokens) - (v.blocks - 1) * v.block_stride
        for at in v.offsets:
            one = Strided((at,), v.axes(tokens), v.unit, v.block_stride, 1, nbytes)
            pieces[v.block_stride].append((at, at + nbytes, v.group, one))
    for of_stride in pieces.values():
        for cluster in _clusters(of_stride):
            members: dict[int, list[Strided]] = defaultdict(list)
            for *_, g, one in cluster:
                members[g].append(one)
            for g, h in combinations(members, 2):
                if space[g] != space[h] and _share([*members[g], *members[h]]):
                    space = {group: space[g] if of == space[h] else of for group, of in space.items()}
    return space


def _clusters(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """Part the pieces into those whose stretches of bytes hang together."""
    out: list[list[_Piece]] = []
    end = -1
    for piece in sorted(pieces, key=lambda piece: piece[:3]):
        if piece[0] >= end:
            out.append([])
        out[-1].append(piece)
        end = max(end, piece[1])
    return out


def _share(layers: Sequence[Strided]) -> bool:
    """Return whether layers of two groups share bytes; also if that would take too long to find out, as with no known engine."""
    try:
        return first_overlap([layers]) is not None
    except ArgumentError:
        return True
