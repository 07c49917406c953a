"""Two engines whose caches lose and get pages while transfers are under way, as kvcached's do, in either of its layouts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.testing.fake import FakeTransport
from tests.data.elastic_pages import second_mapping

__all__ = [
    "AT_ONCE",
    "BLOCKS",
    "LAYERS",
    "LAYOUTS",
    "PLANES",
    "ROWS_A_PAGE",
    "TOKENS",
    "KeepsPages",
    "ElasticCache",
    "Layout",
]

Layout = Literal["contiguous", "apart"]
"""``contiguous``: one buffer, block by block, in each its layers, in each layer K and then V; a page has two blocks. ``apart``: K and V
of each layer in a region of their own; a page has eight blocks of one."""
LAYOUTS: list[tuple[Layout, Layout]] = [("contiguous", "contiguous"), ("apart", "apart"), ("contiguous", "apart")]
"""Of a producer and a consumer."""

LAYERS, PLANES, TOKENS, BLOCKS = ("a", "b"), ("k", "v"), 4, 48
ROWS_A_PAGE = 8
SPARE, AT_ONCE = 4, 6


class KeepsPages(FakeTransport):
    """A back end that moves the pages which memory had when it was registered, and says that it takes elastic memory."""

    def register(self, regions: Sequence[Region]) -> int:
        return super().register(kept(regions))


def kept(regions: Sequence[Region]) -> list[Region]:
    """Return other addresses of the pages that elastic regions have now."""
    return [replace(r, address=second_mapping(r.address, r.nbytes)) if r.elastic else r for r in regions]


class ElasticCache:
    """A cache in which a page has memory as long as one of its blocks is held.

    Args:
        layout: How it is laid out.
        row: Bytes of a block's K or V of one layer.
        dice: Which pages are handed out and stirred.
        pages: Makes its memory.

    Attributes:
        blocks: What they hold, ``[block, layer, plane, row]``.
    """

    def __init__(self, layout: Layout, row: int, dice: random.Random, pages: Callable[..., Any]) -> None:
        self._page, planes = ROWS_A_PAGE * row, len(PLANES)
        self.pages = pages(len(LAYERS) * planes * BLOCKS // ROWS_A_PAGE, SPARE, self._page, dice)
        self._dice = dice
        self._users: Counter[int] = Counter()
        whole, device = self.pages.bytes, self.pages.device
        if layout == "contiguous":
            self.blocks = whole.reshape(BLOCKS, len(LAYERS), planes, row)
            self._strides = len(LAYERS) * planes * row, planes * row, row
            regions = (Region(self.pages.address, whole.nbytes, device),)
            begins = [i * row for i in range(len(LAYERS) * planes)]
        else:
            each = BLOCKS * row
            by_layer = whole.reshape(len(LAYERS), planes, BLOCKS, row)
            self.blocks = by_layer.swapaxes(1, 2).swapaxes(0, 1)
            self._strides = row, planes * each, each
            regions = tuple(Region(self.pages.address + i * each, each, device) for i in range(len(LAYERS) * planes))
            begins = list(Cache(regions, (), ()).starts)
        views = tuple(
            View(
                plane,
                0,
                LAYERS,
                tuple(begins[i::planes]),
                BLOCKS,
                self._strides[0],
                row // TOKENS,
                "test",
                token_stride=row // TOKENS,
            )
            for i, plane in enumerate(PLANES)
        )
        self.cache = Cache(regions, (Group(TOKENS),), views)

    def hold(self, blocks: Sequence[int]) -> None:
        for page in self._pages_of(blocks):
            if not self._users[page]:
                self.pages.map(page)
            self._users[page] += 1

    def free(self, blocks: Sequence[int]) -> None:
        for page in self._pages_of(blocks):
            self._users[page] -= 1
            if not self._users[page]:
                self.pages.unmap(page)

    def write(self, blocks: Sequence[int], rows: np.ndarray) -> None:
        self.blocks[list(blocks)] = self.pages.put(rows)
        self.pages.settle()

    def read(self, blocks: Sequence[int]) -> np.ndarray:
        return self.pages.get(self.blocks[list(blocks)])

    def stir(self) -> None:
        """Have a page that nobody holds get memory with bytes that are nobody's, and lose it."""
        if unused := self.pages.unused():
            page = self._dice.choice(unused)
            self.pages.map(page)
            self.pages.bytes[page * self._page : (page + 1) * self._page] = 0xEE
            self.pages.unmap(page)

    def _pages_of(self, blocks: Sequence[int]) -> list[int]:
        """Return the page of each row of these blocks."""
        by_block, by_layer, by_plane = self._strides
        rows = [(layer, plane) for layer in range(len(LAYERS)) for plane in range(len(PLANES))]
        return [
            (b * by_block + layer * by_layer + plane * by_plane) // self._page for b in blocks for layer, plane in rows
        ]
