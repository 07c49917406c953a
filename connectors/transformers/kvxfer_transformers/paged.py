"""Describe the paged cache of continuous batching: one flat tensor, and a group for each kind of attention.

A block of a group holds a page of keys and one of values of each of its layers, one after the other. A sliding window is
a ring of pages: the token at position p is in slot ``p % window``. What a page of a ring holds depends on how many tokens
there are, so such pages are moved whole, and only between caches of the same page size.
"""

from __future__ import annotations

from typing import Any

from kvxfer import BlockTable, Group
from kvxfer.geometry import Cache, Heads, Region, View
from kvxfer.values import NULL
from kvxfer_transformers.layers import UnsupportedCacheError

__all__ = ["block_table", "described"]


def described(paged: Any) -> tuple[Cache, tuple[Group, ...]]:
    """Return the description of a ``PagedAttentionCache`` for peers, and its groups.

    Raises:
        UnsupportedCacheError: A kind of attention in it is not known.
    """
    tensor = paged.cache_tensor
    groups, views = [], []
    for g, (kind, allocator) in enumerate(paged.cache_allocators.items()):
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedCacheError(
                f"the paged cache has layers of {kind!r}, which are not moved: run the model in one process"
            )
        ring = kind == "sliding_attention"
        groups.append(_group(allocator))
        head = allocator.head_dim * allocator.cache_dtype.itemsize
        token = allocator.num_key_value_heads * head
        page = token * allocator.tokens_per_page
        dtype = str(allocator.cache_dtype).removeprefix("torch.")
        views += [
            View(
                plane=plane,
                group=g,
                layers=tuple(str(layer) for layer in allocator.layer_indices),
                offsets=tuple((2 * i + side) * page for i in range(len(allocator.layer_indices))),
                blocks=tensor.nbytes // allocator.bytes_per_block,
                block_stride=allocator.bytes_per_block,
                unit=page if ring else head,
                encoding=f"{dtype} in rings of {allocator.sliding_window}" if ring else dtype,
                heads=Heads(0, allocator.num_key_value_heads, allocator.num_key_value_heads, None if ring else head),
                token_stride=None if ring else token,
            )
            for side, plane in enumerate(("k", "v"))
        ]
    cache = Cache((Region.of(tensor),), tuple(groups), tuple(views))
    cache.check()
    return cache, tuple(groups)


def block_table(paged: Any, name: str, tokens: int) -> BlockTable:
    """Return the blocks that a request has for its first ``tokens``; a ring's pages are in the last positions."""
    rows = []
    for allocator in paged.cache_allocators.values():
        count = -(-tokens // allocator.tokens_per_page)
        blocks = allocator.block_table.get(name, [])[:count]
        rows.append([NULL] * (count - len(blocks)) + blocks if _group(allocator).window else blocks)
    return BlockTable.of(rows)


def _group(allocator: Any) -> Group:
    window = getattr(allocator, "sliding_window", 0)
    return Group(allocator.tokens_per_page, "window", window) if window else Group(allocator.tokens_per_page)
