"""Where D is short of blocks: what waits for them holds nothing, keeps nobody from loading who needs fewer, and has its turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.values import Group
from kvxfer_vllm.blocks import MAX_PASSED, Room
from kvxfer_vllm.requests import RequestFacts
from tests.vllm.cases import check, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import FULL, HYBRID, PlayedEngine, prompt
from tests.vllm.wire import Wire

overlap = both_ways

LONG = 400
"""Tokens for which there is no room beside a request that runs, and would be in an empty cache."""


def crowded(make: Make, groups: Any = FULL) -> tuple[PlayedEngine, PlayedEngine, str]:
    """P, and a D of which half is in use by a request that runs for a while."""
    p, d = make(groups, blocks=200), make(groups, blocks=42, caching=False)
    runs = d.add(prompt(280, seed=9), n=40)
    d.steps(6)
    assert d.status(runs) == "RUNNING"
    return p, d, runs


def held(d: PlayedEngine, name: str) -> int:
    """How many blocks a request has."""
    return sum(map(len, d.scheduler.kv_cache_manager.get_block_ids(name)))


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_short_loads_pass_a_long_one_for_which_there_is_no_room(make: Make, wire: Wire, groups: Any) -> None:
    p, d, runs = crowded(make, groups)
    texts = [prompt(LONG, seed=1), prompt(60, seed=2), prompt(60, seed=3)]
    long, *short = names = [d.add(text, prefill(p, text)) for text in texts]
    before = d.free
    while not all(name in d.done for name in short):
        d.step()
        assert runs not in d.done, "the short loads waited for room that they did not need"
        assert d.status(long) == "WAITING" and not held(d, long), "it holds blocks while it waits for others"
        assert all(load.fetch.handle != long for load in wire.loads(d))
    assert d.free <= before < d.room, "what has passed has given its blocks back, but for what runs"
    d.run(p)
    for name, text in zip(names, texts, strict=True):
        check(d, name, text)
        assert d.computed[name] == 4, "it was computed, not loaded"


def test_a_long_load_is_not_passed_for_ever(make: Make) -> None:
    """Requests keep coming that would fit, more than it could ever wait for."""
    p, d, runs = crowded(make)
    text = prompt(LONG, seed=1)
    long = d.add(text, prefill(p, text))
    passed, room = [], False
    for i in range(150):
        passed.append(d.add(prompt(30, seed=20 + i), n=30))
        d.step()
        p.busy and p.step()
        room |= runs in d.done
        if long in d.done:
            break
    assert room and long in d.done, "it was passed again and again"
    check(d, long, text)
    assert any(name in d.done for name in passed), "nobody has passed it"
    d.run(p)


def test_what_was_wanted_first_is_fetched_first(make: Make, wire: Wire) -> None:
    p, d = make(blocks=200), make(blocks=200)
    wire.paused = True
    texts = [prompt(n, seed=i) for i, n in enumerate((300, 40, 120, 60))]
    names = [d.add(text, prefill(p, text)) for text in texts]
    d.steps(2)
    assert [load.fetch.handle for load in wire.loads(d)] == names
    wire.paused = False
    d.run(p)
    for name, text in zip(names, texts, strict=True):
        check(d, name, text)


class Cache:
    """What ``Room`` asks of vLLM's cache (``internals.PrefixCache``)."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self.tables: dict[str, list[int]] = {}

    @property
    def free(self) -> int:
        return self._blocks - sum(map(len, self.tables.values()))

    def table(self, name: str) -> tuple[list[int], ...]:
        return (self.tables.get(name, []),)


def test_few_are_passed_at_a_time_and_only_for_want_of_room() -> None:
    """vLLM asks in every step for each that it is told to skip."""
    cache: Any = Cache(10)
    room = Room([Group(16)], cache)
    *long, short = (
        RequestFacts(name, i) for i, name in enumerate([*(f"long{i}" for i in range(MAX_PASSED + 1)), "short"])
    )
    assert [room.lacks(facts, 0, 176) for facts in long] == [True] * MAX_PASSED + [False]
    assert not room.lacks(short, 0, 160) and not room.lacks(long[1], 16, 176)
    cache.tables["short"] = [1, 2]
    room.admitted(short)
    assert not room.lacks(long[0], 0, 160), "it would have room, had nobody passed it"
    assert room.lacks(long[0], 0, 176)
    room.finished(long[1])
    assert room.lacks(long[-1], 0, 176) and not room.lacks(long[-1], 0, 128), "who came later has not been passed"
