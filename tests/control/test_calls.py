"""Blocks of fetches and offers that would be written, or read, as another's: refused by the call, while shared ones are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec.structs import replace

from kvxfer import Agent, ArgumentError, BlockTable, Config, Directory, Ended, Fetch, Group, Offer, TransferId
from kvxfer.geometry import Cache, Region, View
from kvxfer.protocol.values import Released
from tests.control.conftest import until

TOKENS, UNIT, BLOCKS = 4, 16, 64
PAGE = TOKENS * UNIT
ROWS = st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True)
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


def given_up(agent: Agent) -> None:
    """Wait until the agent has released one more transfer."""
    seen: list[Any] = []
    until(lambda: bool(seen.extend(agent.events()) or [e for e in seen if isinstance(e, Released)]))


def test_what_a_fetch_fills_is_not_offered_before_that_is_released(pair: Make) -> None:
    """A reader would have bytes that have not arrived."""
    _, d, directory = pair((FULL,), apart(1))
    d.fetch(fetch(directory, "a", [[1, 2, 3]], 12))
    told = r"block 3, which the fetch 'a' fills until it is released: make the offer 'q' \(own/1/b#0\) after that"
    with pytest.raises(ArgumentError, match=told):
        d.offer(replace(offer("b", [[4, 3]], 8), handle="q"))
    d.offer(offer("b", [[4, 5]], 8))  # the refused one has left nothing behind
    d.offer(replace(offer("c", [[6, 3]], 4), final=False))  # of which only the first block is to be read so far
    with pytest.raises(ArgumentError, match="block 3, which the fetch 'a' fills"):
        d.offer(offer("c", [[6, 3]], 8))
    d.cancel("a", "enough")
    given_up(d)
    d.offer(offer("c", [[6, 3]], 8))


def test_no_fetch_fills_what_is_offered_before_that_is_given_up(pair: Make) -> None:
    """A reader would have the bytes of the fetch."""
    _, d, directory = pair((FULL, WINDOW), apart(2))
    d.offer(replace(offer("a", [[1, 2], []], 4), final=False, handle="q"))
    d.offer(replace(offer("a", [[1, 2], [-1, 7]], 8), handle="q"))
    told = (
        r"block 2, which the offer 'q' \(own/1/a#0\) lists until it is revoked or released: begin the fetch 'b' after"
    )
    with pytest.raises(ArgumentError, match=told):
        d.fetch(fetch(directory, "b", [[3, 2], []], 8))
    with pytest.raises(ArgumentError, match=r"block 1, which the offer 'q' \(own/1/a#0\) lists"):
        d.fetch(fetch(directory, "b", [[1, 3], []], 8))
    with pytest.raises(ArgumentError, match="block 7, which the offer"):
        d.fetch(fetch(directory, "b", [[3, 4], [-1, 7]], 8))
    d.fetch(fetch(directory, "b", [[1, 2, 3], []], 12, start=8))  # which touches nothing before its start
    d.offer(offer("c", [[1, 5], [-1, 8]], 8))  # a prefix that both share
    d.revoke(TransferId("own/1/a", 0), 1, "recomputed", gone=False)
    d.fetch(fetch(directory, "d", [[2], []], 4))
    with pytest.raises(ArgumentError, match="block 1, which the offer own/1/c#0 lists"):
        d.fetch(fetch(directory, "e", [[1], []], 4))
    d.revoke(TransferId("own/1/c", 0), 1, "gone", gone=True)
    d.fetch(fetch(directory, "e", [[1], []], 4))


def test_what_stays_for_its_readers_is_not_filled_before_it_is_released(pair: Make) -> None:
    _, d, directory = pair((FULL,), apart(1))
    d.offer(offer("a", [[1]], 4))
    d.revoke(TransferId("own/1/a", 0), 1, "its client has left", gone=True, kept=True)
    given_up(d)
    d.fetch(fetch(directory, "b", [[1]], 4))


def test_an_offer_that_comes_too_late_leaves_nothing_behind(pair: Make) -> None:
    _, d, directory = pair((FULL,), apart(1))
    d.revoke(TransferId("own/1/a", 0), 3, "aborted", gone=True)
    given_up(d)
    d.offer(offer("a", [[1]], 4))  # of generation 1, which no event tells of

    def filled() -> bool:
        try:
            d.fetch(fetch(directory, "b", [[1]], 4))
        except ArgumentError:
            return False
        return True

    until(filled)


class Agents(RuleBasedStateMachine):
    """Offers and fetches of one agent, against what they say of their blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stack, self.names = ExitStack(), count()
        memory = np.zeros(8 * PAGE, np.uint8)
        views = (View("kv", 0, ("layer",), (0,), 8, PAGE, UNIT, "e", token_stride=UNIT),)
        config = Config(backend="kvxfer.testing.fake:FakeTransport", staging_bytes=1 << 20)
        cache = Cache((Region(memory.ctypes.data, memory.nbytes),), (FULL,), views)
        self.memory, self.agent = memory, self.stack.enter_context(Agent(cache, config, "d"))
        self.nobody = self.stack.enter_context(Directory(config, "p"))  # has no worker, so that fetches wait
        self.offers: dict[str, Offer] = {}
        self.fetches: dict[str, set[int]] = {}

    def teardown(self) -> None:
        self.stack.close()

    def goes(self, call: Callable[[], None], blocks: set[int], fills: bool) -> bool:
        taken: set[int] = set().union(*self.fetches.values())
        if fills:
            taken = taken.union(*(o.blocks.ids()[: o.tokens // TOKENS] for o in self.offers.values()))
        if not blocks & taken:
            call()
            return True
        with pytest.raises(ArgumentError, match=f"block {min(blocks & taken)}, which the (offer|fetch)"):
            call()
        return False

    @rule(row=ROWS)
    def fetch(self, row: list[int]) -> None:
        name = f"f{next(self.names)}"
        want = fetch(self.nobody, name, [row], TOKENS * len(row))
        if self.goes(lambda: self.agent.fetch(want), set(row), True):
            self.fetches[name] = set(row)

    @rule(row=ROWS, data=st.data())
    def offer(self, row: list[int], data: st.DataObject) -> None:
        name, blocks = f"o{next(self.names)}", data.draw(st.integers(1, len(row)))
        have = replace(offer(name, [row], blocks * TOKENS), final=False)
        if self.goes(lambda: self.agent.offer(have), set(row[:blocks]), False):
            self.offers[name] = have

    @precondition(lambda self: self.offers)
    @rule(data=st.data())
    def more(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        have = replace(self.offers[name], tokens=TOKENS * len(self.offers[name].blocks.ids()), final=True)
        if self.goes(lambda: self.agent.offer(have), set(have.blocks.ids()), False):
            self.offers[name] = have

    @precondition(lambda self: self.offers)
    @rule(data=st.data(), gone=st.booleans())
    def revoke(self, data: st.DataObject, gone: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.offers)))
        self.agent.revoke(self.offers.pop(name).transfer, 1, "given up", gone)

    @precondition(lambda self: self.fetches)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.fetches)))
        self.agent.cancel(name, "not wanted")
        until(lambda: any(isinstance(e, Released) and e.handle == name for e in self.agent.events()))
        del self.fetches[name]


TestAgents = Agents.TestCase
TestAgents.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
