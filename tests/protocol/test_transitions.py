"""The tables of ranks, serves and staged pieces: nothing undecided, nothing decided twice, nothing without a way out."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvxfer.data.jobs.piece import PIECE, PieceEvent, PieceState
from kvxfer.protocol.transitions import (
    RANK_FETCH,
    RANK_SERVE,
    IllegalTransition,
    RankFetchEvent,
    RankFetchState,
    ServeEvent,
    ServeState,
    Transitions,
)

TABLES = {
    "lane": (RANK_FETCH, RankFetchState, RankFetchEvent),
    "serve": (RANK_SERVE, ServeState, ServeEvent),
    "piece": (PIECE, PieceState, PieceEvent),
}
each_table = pytest.mark.parametrize(("life", "states", "events"), TABLES.values(), ids=TABLES.keys())


@each_table
def test_every_pair_is_decided_once(life: Transitions[Any, Any], states: Any, events: Any) -> None:
    decided = [*life.moves, *(p for part in (life.ignored, life.never) for pairs in part.values() for p in pairs)]
    assert len(decided) == len(set(decided)), "decided twice"
    assert set(decided) == {(s, e) for s in states for e in events}


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


@each_table
def test_stimuli_that_mean_nothing_change_nothing(life: Transitions[Any, Any], states: Any, events: Any) -> None:
    for state, stimulus in (pair for pairs in life.ignored.values() for pair in pairs):
        assert life.after(state, stimulus) is None


@each_table
def test_what_never_comes_about_is_no_ignored_stimulus(life: Transitions[Any, Any], states: Any, events: Any) -> None:
    for state, stimulus in (pair for pairs in life.never.values() for pair in pairs):
        with pytest.raises(IllegalTransition):
            life.after(state, stimulus)


def test_the_page_shows_the_tables_as_they_are() -> None:
    path = Path(__file__).parents[2] / "docs" / "diagrams.py"
    spec = importlib.util.spec_from_file_location("diagrams", path)
    assert spec is not None and spec.loader is not None
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    page = path.with_name("protocol.md").read_text()
    assert diagrams.drawn(page) == page, "run: python docs/diagrams.py"
