"""Blocks of fetches and offers that would be written, or read, as another's: refused by the call, while shared ones are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, ArgumentError, BlockTable, Config, Directory, Ended, Fetch, Group, Offer, TransferId
from kvxfer.geometry import Cache, Region, View
from kvxfer.protocol.values import Released
from tests.control.conftest import until

TOKENS, UNIT, BLOCKS = 4, 16, 64
PAGE = TOKENS * UNIT
FULL, WINDOW = Group(TOKENS), Group(TOKENS, "window", 5)


def apart(groups: int) -> list[tuple[int, int]]:
    """Each group has memory of its own: (offset of block 0, bytes between tokens) of each."""
    return [(g * BLOCKS * PAGE, UNIT) for g in range(groups)]


def overlaid(groups: int) -> list[tuple[int, int]]:
    """One pool of blocks for all groups."""
    return [(0, UNIT)] * groups


Make = Callable[..., tuple[Agent, Agent, Directory]]


@pytest.fixture
def pair() -> Iterator[Make]:
    """Makes a producer and a consumer whose cache has these groups, each at the offset and with the bytes between tokens of its place."""
    with ExitStack() as stack:

        def make(groups: tuple[Group, ...], places: list[tuple[int, int]], block_stride: int = PAGE) -> Any:
            agents = []
            for name in ("p", "d"):
                memory = np.zeros(len(groups) * BLOCKS * PAGE, np.uint8)
                stack.callback(memory.sum)  # keeps it
                views = tuple(
                    View("kv", g, (f"layer {g}",), (at,), BLOCKS, block_stride, UNIT, "e", token_stride=step)
                    for g, (at, step) in enumerate(places)
                )
                cache = Cache((Region(memory.ctypes.data, memory.nbytes),), groups, views)
                config = Config(backend="kvxfer.testing.fake:FakeTransport", staging_bytes=1 << 20)
                agents.append(stack.enter_context(Agent(cache, config, name)))
            directory = stack.enter_context(Directory(config, "p", epoch=agents[0].epoch))
            directory.publish((agents[0].descriptor,))
            return *agents, directory

        yield make


def fetch(directory: Directory, handle: str, rows: list[list[int]], tokens: int, start: int = 0) -> Fetch:
    transfer = TransferId(f"own/1/{handle}", 0)
    return Fetch(handle, transfer, b"d", directory.source, BlockTable.of(rows), start, tokens)


def offer(handle: str, rows: list[list[int]], tokens: int) -> Offer:
    return Offer(TransferId(f"own/1/{handle}", 0), b"d", 1, tokens, BlockTable.of(rows), True)


def test_a_fetch_into_blocks_that_another_fills_is_refused_until_that_is_released(pair: Make) -> None:
    """One of them would have the other's bytes."""
    p, d, directory = pair((FULL,), apart(1))
    d.fetch(fetch(directory, "a", [[1, 2, 3]], 12))
    with pytest.raises(
        ArgumentError, match="blocks must not list block 3, which the fetch 'a' fills until it is released"
    ):
        d.fetch(fetch(directory, "b", [[4, 3]], 8))
    d.fetch(fetch(directory, "b", [[4, 5]], 8))  # its handle is unused, and so is block 4
    p.offer(offer("a", [[1, 2, 3]], 12))
    seen: list[Any] = []
    until(lambda: bool(seen.extend(d.events()) or [e for e in seen if isinstance(e, Released)]))
    assert [e.outcome.delivered for e in seen if isinstance(e, Ended)] == [True]
    d.fetch(fetch(directory, "a", [[3]], 4))


def test_long_tables_are_compared_too(pair: Make) -> None:
    _, d, directory = pair((FULL,), apart(1))
    d.fetch(fetch(directory, "a", [list(range(40))], 160))
    with pytest.raises(ArgumentError, match="block 39, which the fetch 'a' fills"):
        d.fetch(fetch(directory, "b", [[*range(60, 40, -1), 39]], 84))
    d.fetch(fetch(directory, "b", [list(range(40, 60))], 80))


def test_blocks_before_the_start_may_be_those_of_others(pair: Make) -> None:
    """They are in the prefix cache, and nothing is written there."""
    _, d, directory = pair((FULL, WINDOW), apart(2))
    d.fetch(fetch(directory, "a", [[1, 2, 3], [1, 2, 3]], 12, start=8))
    d.fetch(fetch(directory, "b", [[1, 2, 4], [-1, 2, 4]], 12, start=8))
    with pytest.raises(ArgumentError, match="block 4, which the fetch 'b' fills"):
        d.fetch(fetch(directory, "c", [[5], [4]], 4))


def test_what_is_offered_may_be_so_again_and_to_others(pair: Make) -> None:
    p, _, _ = pair((FULL, FULL), overlaid(2))
    p.offer(offer("a", [[1, 2], [3, 4]], 8))
    p.offer(offer("b", [[1, 5], [3, 6]], 8))


INTERLEAVED = ([(0, 2 * UNIT), (UNIT, 2 * UNIT)], 2 * PAGE)
"""Two groups whose tokens take turns in each block, which share no byte."""
SHIFTED = ([(0, UNIT), (8 * PAGE, UNIT)], PAGE)
"""Two groups of one pool, of which the second counts its blocks from the eighth on."""


@pytest.mark.parametrize(
    ("places", "stride"), [(apart(2), PAGE), INTERLEAVED, SHIFTED], ids=["apart", "interleaved", "shifted"]
)
def test_groups_with_memory_of_their_own_may_use_the_same_ids(
    pair: Make, places: list[tuple[int, int]], stride: int
) -> None:
    p, d, directory = pair((FULL, WINDOW), places, stride)
    d.fetch(fetch(directory, "a", [[1, 2], [1, 2]], 8))
    d.fetch(fetch(directory, "b", [[3], [4]], 4))
    d.fetch(fetch(directory, "c", [[4], [3]], 4))
    p.offer(offer("a", [[1, 2], [1, 2]], 8))


def test_groups_over_each_other_must_not_have_the_same_block(pair: Make) -> None:
    """It would hold the KV of the one or of the other."""
    p, d, directory = pair((FULL, WINDOW), overlaid(2))
    told = r"blocks\[1\] must not list block 2, which another group lists"
    with pytest.raises(ArgumentError, match=told):
        d.fetch(fetch(directory, "a", [[1, 2], [3, 2]], 8))
    with pytest.raises(ArgumentError, match=told):
        p.offer(offer("a", [[1, 2], [2, 3]], 8))
    d.fetch(fetch(directory, "a", [[1, 2], [3, 4]], 8))
    with pytest.raises(ArgumentError, match="block 3, which the fetch 'a' fills"):
        d.fetch(fetch(directory, "b", [[3, 5], [6, 7]], 8))
