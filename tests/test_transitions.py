"""The tables of all that has a life: nothing undecided, nothing decided twice, a way out of every state, and drawn as they are."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.data.jobs.piece import PIECE, PieceEvent, PieceState
from kvxfer.protocol.transitions import (
    RANK_FETCH,
    RANK_SERVE,
    READER,
    RankFetchEvent,
    RankFetchState,
    ReaderEvent,
    ReaderState,
    ServeEvent,
    ServeState,
)
from kvxfer.schedule import ASK, LOAD, OFFERING, AskEvent, AskState, LoadEvent, LoadState, OfferingEvent, OfferingState
from kvxfer.transitions import IllegalTransition, Transitions

TABLES = {
    "lane": (RANK_FETCH, RankFetchState, RankFetchEvent),
    "serve": (RANK_SERVE, ServeState, ServeEvent),
    "reader": (READER, ReaderState, ReaderEvent),
    "piece": (PIECE, PieceState, PieceEvent),
    "load": (LOAD, LoadState, LoadEvent),
    "offering": (OFFERING, OfferingState, OfferingEvent),
    "ask": (ASK, AskState, AskEvent),
}
each_table = pytest.mark.parametrize(("life", "states", "events"), TABLES.values(), ids=TABLES.keys())


@each_table
def test_every_pair_is_decided_once(life: Transitions[Any, Any], states: Any, events: Any) -> None:
    decided = [*life.moves, *(p for part in (life.ignored, life.never) for pairs in part.values() for p in pairs)]
    assert not {pair for pair in decided if decided.count(pair) > 1}, "decided twice"
    assert {(s, e) for s in states for e in events} == set(decided)


@each_table
def test_every_state_is_reached_and_every_life_can_end(life: Transitions[Any, Any], states: Any, events: Any) -> None:
    first = next(iter(states))
    assert {after for (before, _), after in life.moves.items() if after is not before} | {first} == set(states)
    final = {s for s in states if not any(before is s for before, _ in life.moves)}
    assert final, "nothing is final"
    for state in states:
        reached = {state}
        for _ in states:
            reached |= {after for (before, _), after in life.moves.items() if before in reached}
        assert reached & final, f"{state} leads nowhere"


@pytest.mark.parametrize("name", ["load", "offering", "ask"])
def test_what_the_engine_sees_has_one_end(name: str) -> None:
    life, states, _ = TABLES[name]
    assert len([s for s in states if not any(before is s for before, _ in life.moves)]) == 1


@each_table
def test_what_is_ignored_changes_nothing_and_what_never_happens_raises(
    life: Transitions[Any, Any], states: Any, events: Any
) -> None:
    for state, event in (pair for pairs in life.ignored.values() for pair in pairs):
        assert life.after(state, event) is None
    for state, event in (pair for pairs in life.never.values() for pair in pairs):
        with pytest.raises(IllegalTransition):
            life.after(state, event)
