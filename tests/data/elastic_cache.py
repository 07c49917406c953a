"""Two engines whose caches lose and get pages while transfers are under way, as kvcached's do, in either of its layouts."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.fake import FakeTransport
from kvxfer.values import BlockTable, Fetch, Offer
from tests.data.elastic_pages import ElasticPages, second_mapping

__all__ = ["AT_ONCE", "LAYERS", "LAYOUTS", "PLANES", "ROWS_A_PAGE", "TOKENS", "KeepsPages", "Layout", "Room", "Side"]

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


@dataclass
class Side:
    """An engine of one rank over an elastic cache."""

    cache: ElasticCache
    agent: Agent
    directory: Directory
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))

    @classmethod
    def start(
        cls,
        backend: str,
        layout: Layout,
        elastic: bool | None,
        options: Mapping[str, Any],
        row: int,
        dice: random.Random,
        pages: Callable[..., Any],
    ) -> Side:
        """Start one; see ``Room`` for what it is made of."""
        config = Config.from_mapping(
            {
                "backend": backend,
                "backend_options": dict(options),
                "transfer_timeout": 20.0,
                "peer_timeout": 10.0,
                "staging_bytes": 1 << 20,
                "elastic": elastic,
            }
        )
        cache = ElasticCache(layout, row, dice, pages)
        agent = Agent(cache.cache, config, "elastic")
        directory = Directory(config, "elastic")
        directory.publish((agent.descriptor,))
        return cls(cache, agent, directory)

    def take(self, count: int, dice: random.Random) -> list[int]:
        blocks = dice.sample(self.free, count)
        self.free = [b for b in self.free if b not in blocks]
        self.cache.hold(blocks)
        return blocks

    def give_back(self, blocks: Sequence[int]) -> None:
        self.cache.free(blocks)
        self.free += blocks

    def close(self) -> None:
        self.agent.close()
        self.directory.close()
        self.cache.pages.close()


@dataclass
class _Moving:
    theirs: list[int]
    mine: list[int]
    fresh: np.ndarray
    released: int = 0


class Room:
    """A producer and a consumer, each of whose caches is elastic or not, by what its operator says.

    Args:
        backend: Its name, or ``auto``.
        layouts: Of the producer and of the consumer.
        elastic: Whether each is; ``None``: found out.
        options: Of the back end.
        row: Bytes of a block's K or V of one layer; a back end with a longer ``run_bytes`` stages them.
        pages: Makes the memory, as ``ElasticPages`` does.
    """

    def __init__(
        self,
        backend: str,
        layouts: tuple[Layout, Layout] = ("contiguous", "contiguous"),
        elastic: tuple[bool | None, bool | None] = (True, True),
        options: Mapping[str, Any] | None = None,
        row: int = 4096,
        pages: Callable[..., Any] = ElasticPages,
    ) -> None:
        self._row = row
        self._dice, self._number = random.Random(f"{backend} {layouts}"), 0
        self.sides: list[Side] = []
        for layout, is_elastic in zip(layouts, elastic, strict=True):
            self.sides.append(Side.start(backend, layout, is_elastic, options or {}, row, self._dice, pages))

    def move(self, transfers: int) -> list[int]:
        """Move as many requests of fresh blocks, several at a time, whose pages are mapped before and unmapped after.

        Returns:
            Which of them brought other bytes than were there.
        """
        wrong: list[int] = []
        moving: dict[TransferId, _Moving] = {}
        last, end = self._number + transfers, time.monotonic() + 60
        while self._number < last or moving:
            assert time.monotonic() < end, f"{moving.keys()} do not end"
            while self._number < last and len(moving) < AT_ONCE:
                self._begin(moving)
            for side in self.sides:
                side.cache.stir()
                for event in side.agent.events():
                    match event:
                        case Ended(outcome=outcome):
                            assert outcome.delivered, outcome
                        case Released(transfer=transfer):
                            if self._let_go(moving, transfer) is False:
                                wrong.append(transfer.prompt)
            time.sleep(0.0002)
        for side in self.sides:
            assert not any(side.cache.pages.zero()), "somebody has written where no memory was"
        return wrong

    @property
    def staged(self) -> bool:
        """Whether all went staged; all or nothing is asserted."""
        stats = [side.agent.stats() for side in self.sides]
        direct, staged = any(s.direct for s in stats), any(s.staged for s in stats)
        assert direct is not staged, stats
        return staged

    def close(self) -> None:
        for side in self.sides:
            side.close()

    def _begin(self, moving: dict[TransferId, _Moving]) -> None:
        p, d = self.sides
        count = self._dice.randint(1, 6)
        tokens, transfer = count * TOKENS, TransferId("own/1/elastic", self._number)
        self._number += 1
        theirs, mine = p.take(count, self._dice), d.take(count, self._dice)
        shape = (count, len(LAYERS), len(PLANES), self._row)
        fresh = np.frombuffer(self._dice.randbytes(int(np.prod(shape))), np.uint8).reshape(shape)
        p.cache.write(theirs, fresh)
        moving[transfer] = _Moving(theirs, mine, fresh)
        p.agent.offer(Offer(transfer, b"d", 1, tokens, BlockTable.of([theirs]), True))
        source = p.directory.source
        d.agent.fetch(Fetch(str(transfer), transfer, b"d", source, BlockTable.of([mine]), 0, tokens))

    def _let_go(self, moving: dict[TransferId, _Moving], transfer: TransferId) -> bool | None:
        """Free a request's blocks once both sides have let go of them; then return whether its bytes are right."""
        it = moving[transfer]
        it.released += 1
        if it.released < 2:
            return None
        p, d = self.sides
        right = np.array_equal(d.cache.read(it.mine), it.fresh)
        del moving[transfer]
        p.give_back(it.theirs)
        d.give_back(it.mine)
        return right
