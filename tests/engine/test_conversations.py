"""Conversations whose turns go to any engine: what is loaded is what the two have in common, and every byte is right."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.engine import BlockPins, HeldPrefix, Prefix
from kvxfer.identity import Source
from kvxfer.testing.engine import ConversationEngine, PagedEngine, PagedMemory, Turn, until
from kvxfer.values import BlockTable, Group

STEP = 16
EAGER = {"ask_tokens": 1, "ask_timeout": 5.0}
"""They ask for whatever they can get, and a busy machine delays an answer, not more."""
SHAPES = {
    "alike": ({}, {}),
    "other blocks": ({"tokens": 4, "blocks": 96}, {"tokens": 6, "blocks": 64}),
    "TP 2 to 1": ({"ranks": 2}, {"tokens": 8, "blocks": 48}),
    "TP 1 to 2": ({"tokens": 16, "blocks": 24}, {"ranks": 2, "dims": "block layer head token unit"}),
    "TP 4 to 2": ({"ranks": 4, "dims": "layer block head token unit"}, {"ranks": 2}),
}


class Pair:
    """A prefill and a decode engine, whose steps are made by turns."""

    def __init__(self, p: ConversationEngine, d: ConversationEngine) -> None:
        self.p, self.d, self.names = p, d, 0
        p.step(), d.step()

    def turn(
        self, at: ConversationEngine, prompt: Sequence[int], answer: Sequence[int], *sources: Source, **more: object
    ) -> Turn:
        self.names += 1
        turn = at.begin(f"r{self.names}", prompt, answer, sources, **more)  # type: ignore[arg-type]
        return at.finish_turn(turn, [self.d if at is self.p else self.p])

    def settled(self) -> bool:
        """Nothing is held, remembered or waited for."""
        for engine in (self.p, self.d):
            engine.step(timeout=0.001)
        sides = self.p.scheduler, self.d.scheduler
        return (
            not any(len(side) or side.waiting for side in sides) and not self.p.pool.used() and not self.d.pool.used()
        )

    def over(self) -> None:
        until(self.settled)
        self.p.verify(), self.d.verify()


@pytest.fixture(params=SHAPES.values(), ids=SHAPES.keys())
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    p, d = request.param
    with ExitStack() as stack:
        made = ((name, more) for name, more in (("p", p), ("d", d)))
        yield Pair(*(stack.enter_context(ConversationEngine(EAGER, name=name, **more)) for name, more in made))


def test_the_next_turn_loads_the_answer_of_the_last(pair: Pair) -> None:
    """P computes no more at each turn than what is new, and a step of the chain and a block."""
    rng, history, known = random.Random(1), list[int](), 0
    for _ in range(5):
        history += [rng.randrange(100) for _ in range(rng.randrange(3, 12))]
        at_p = pair.turn(pair.p, history, [1], pair.d.scheduler.source)
        assert at_p.fresh <= len(history) - known + STEP + pair.d.memory.tokens, at_p
        answer = [rng.randrange(100) for _ in range(rng.randrange(10, 20))]
        pair.turn(pair.d, history, answer, pair.p.scheduler.source)
        history += answer
        known = len(history) - 1
    counts = pair.p.scheduler.asked[""]
    assert counts.loaded == counts.found > 0 and not counts.recomputed
    pair.over()


EDITS = {
    "the thinking is dropped": lambda row, rng: row[:24] + row[40:],
    "a word is changed": lambda row, rng: [*row[:33], 99, *row[34:]],
    "a word is put in": lambda row, rng: [*row[:17], 98, *row[17:]],
    "it begins in another way": lambda row, rng: [97, *row],
    "it is another conversation": lambda row, rng: [rng.randrange(50, 90) for _ in row],
    "it is cut": lambda row, rng: row[:35],
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())
def test_of_an_edited_history_only_the_common_part_is_loaded(pair: Pair, edit: object) -> None:
    rng = random.Random(2)
    history = [rng.randrange(50) for _ in range(60)]
    pair.turn(pair.d, history[:40], history[40:])
    edited = [*edit(history, rng), 1, 2, 3]  # type: ignore[operator]
    pair.d.memory.verify()
    common = next((i for i, (a, b) in enumerate(zip(history[:-1], edited, strict=False)) if a != b), len(history) - 1)
    turn = pair.turn(pair.p, edited, [4], pair.d.scheduler.source)
    assert turn.loaded <= common
    assert turn.loaded >= min(common, len(edited) - 1) // STEP * STEP - STEP - pair.d.memory.tokens
    pair.over()


def test_what_was_computed_under_a_salt_is_found_only_by_who_states_it(pair: Pair) -> None:
    prompt = list(range(40))
    pair.turn(pair.d, prompt, [1] * 8, salt="a")
    there = pair.d.scheduler.source
    for salt in ("", "b", "a "):
        assert not pair.turn(pair.p, prompt, [1], there, salt=salt).loaded
    assert pair.turn(pair.p, prompt, [1], there, salt="a").loaded
    pair.over()


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 30), shape=st.sampled_from(sorted(SHAPES)))
def test_any_conversations_anywhere(seed: int, shape: str) -> None:
    """Several conversations at three engines with small caches; turns go anywhere, histories are edited, and every byte is compared."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        made = [*SHAPES[shape], {"tokens": 5, "blocks": 40}]
        engines = [
            stack.enter_context(ConversationEngine(EAGER, name=f"e{i}", **more))
            for i, more in enumerate(made)  # type: ignore[arg-type]
        ]
        for engine in engines:
            engine.step()
        histories = [[rng.randrange(20) for _ in range(rng.randrange(8, 40))] for _ in range(4)]
        for n in range(14):
            at, history = rng.choice(engines), rng.choice(histories)
            if rng.random() < 0.3 and len(history) > 20:
                cut = rng.randrange(len(history))
                history[cut:] = [rng.randrange(20) for _ in range(rng.randrange(1, 20))]
            del history[100:]
            answer = [rng.randrange(20) for _ in range(rng.randrange(1, 12))]
            sources = [other.scheduler.source for other in engines if rng.random() < 0.8]
            turn = at.begin(f"r{n}", history, answer, sources, salt=rng.choice(["", "", "s"]))
            at.finish_turn(turn, [other for other in engines if other is not at])
            history += answer
            if rng.random() < 0.1:
                rng.choice(engines).drop_cache()
        for engine in engines:
            until(lambda: [e.step(timeout=0.001) for e in engines] and not any(len(e.scheduler) for e in engines))
            engine.verify()
            assert not engine.pool.used()


@pytest.mark.parametrize(
    ("group", "held"),
    [(Group(4, "window", 10), [-1] * 5 + [3, 7, 1]), (Group(64, "state"), [5])],
    ids=["window", "state"],
)
def test_windows_and_states_are_loaded_as_far_as_the_cache_has_them(group: Group, held: list[int]) -> None:
    """A holder has given up what is behind its window, or has one state: they are of use after exactly these tokens."""
    tokens, size = 32, 4 if group.window else 64
    axes = None if group.window else "layer block unit unit unit"
    with ExitStack() as stack:
        p, d = (
            stack.enter_context(
                PagedEngine(
                    EAGER,
                    PagedMemory(tokens=size, group=group, seed=i, described=axes),
                    name=f"e{i}",
                    pins=BlockPins(8, Everything()),
                )
            )
            for i in range(2)
        )
        p.step(), d.step()
        prefix = Prefix(range(50), model="m")
        content = p.memory.read([block for block in held if block >= 0])
        p.scheduler.holds = lambda inquiry: HeldPrefix(tokens, BlockTable.of([held]))
        assert d.scheduler.ask("r", prefix, [p.scheduler.source], 49)
        until(lambda: p.step(timeout=0.001) and False or d.scheduler.loadable("r", 0) is not None)
        assert d.scheduler.loadable("r", 0) == tokens
        row = [-1] * 5 + [8, 9, 10] if group.window else [8]
        d.scheduler.allocated("r", BlockTable.of([row]), tokens)
        until(lambda: p.step(timeout=0.001) and False or "r" in d.step(timeout=0.001).loaded)
        found = d.memory.read([block for block in row if block >= 0])
        first = 3 if group.window else 0  # the window of the next token begins within the first block
        assert (found[:, 0, first:] == content[:, 0, first:]).all() and (found[:, 1:] == content[:, 1:]).all()
        assert not d.scheduler.finished("r", BlockTable.of([row]), complete=True)
        until(lambda: p.step(timeout=0.001) and False or not len(p.scheduler) + len(d.scheduler))


class Everything:
    """A pool in which every block is in use."""

    def touch(self, blocks: Sequence[int]) -> None:
        """Nothing to do."""

    def free(self, blocks: Sequence[int]) -> None:
        """Nothing to do."""

    def used(self) -> int:
        return 1
