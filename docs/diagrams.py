"""Write the tables of states and events into the pages that explain them: ``python docs/diagrams.py``.

In ``docs/protocol.md`` it replaces what stands between ``<!-- rank fetch -->`` and ``<!-- end rank fetch -->`` by a table of
all moves and one of what is ignored, and why; and the same for the other tables and pages.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

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
from kvxfer.transitions import Transitions

Table = tuple[Transitions[Any, Any], Any, Any]

PAGE = Path(__file__).with_name("protocol.md")
TABLES: dict[str, Table] = {
    "rank fetch": (RANK_FETCH, RankFetchState, RankFetchEvent),
    "serve": (RANK_SERVE, ServeState, ServeEvent),
    "reader": (READER, ReaderState, ReaderEvent),
    "piece": (PIECE, PieceState, PieceEvent),
}
ROOM = Path(__file__).with_name("engine-room.md")
ROOM_TABLES: dict[str, Table] = {
    "load": (LOAD, LoadState, LoadEvent),
    "offering": (OFFERING, OfferingState, OfferingEvent),
    "ask": (ASK, AskState, AskEvent),
}


def moves(life: Transitions[Any, Any], states: Any) -> str:
    """Return a table of all moves; stimuli that lead from one state to the same other share a row."""
    rows: dict[tuple[Any, Any], list[Any]] = defaultdict(list)
    for (before, stimulus), after in life.moves.items():
        rows[before, after].append(stimulus)
    lines = ["| state | on | becomes |", "| --- | --- | --- |"]
    lines += [f"| {a} | {'<br/>'.join(rows[a, b])} | {b} |" for a in states for b in states if (a, b) in rows]
    return "\n".join(lines)


def ignored(life: Transitions[Any, Any], states: Any, events: Any) -> str:
    """Return a table of the pairs that change nothing."""
    lines = ["| what changes nothing | in state | because |", "| --- | --- | --- |"]
    for reason, pairs in life.ignored.items():
        by_states: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
        for stimulus in events:
            where = tuple(s for s in states if (s, stimulus) in pairs)
            if where:
                by_states[where].append(stimulus)
        for where, stimuli in by_states.items():
            lines.append(f"| {'<br/>'.join(stimuli)} | {', '.join(where)} | {reason} |")
    return "\n".join(lines)


def drawn(page: str, tables: dict[str, Table] = TABLES) -> str:
    """Return a page with these tables as they are now."""
    for name, (life, states, events) in tables.items():
        body = f"<!-- {name} -->\n{moves(life, states)}\n\n{ignored(life, states, events)}\n<!-- end {name} -->"
        page, found = re.subn(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _, b=body: b, page, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"the page has no place for the table {name!r}")
    return page


WRITES = {PAGE: drawn, ROOM: partial(drawn, tables=ROOM_TABLES)}
"""What this program writes: the pages, and how."""


if __name__ == "__main__":
    for file, write in WRITES.items():
        file.write_text(write(file.read_text()))
