"""Readers of an offer follow their table, whatever path has led them to a state."""

from __future__ import annotations

import pytest

from kvxfer.protocol.readers import Readers
from kvxfer.protocol.transitions import READER, ReaderEvent, ReaderState
from kvxfer.transitions import IllegalTransition

R, E = ReaderState, ReaderEvent
PATHS = {
    R.UNKNOWN: (),
    R.READING: (E.WANT,),
    R.DROPPED: (E.DROP,),
    R.INELIGIBLE: (E.WANT_MORE,),
    R.DELIVERED: (E.SETTLE,),
}


@pytest.mark.parametrize("state", R)
@pytest.mark.parametrize("event", E)
def test_a_reader_moves_as_its_table_says(state: ReaderState, event: ReaderEvent) -> None:
    readers = Readers()
    for one in PATHS[state]:
        readers.on(7, one)
    assert readers.state(7) is state
    try:
        after = READER.after(state, event)
    except IllegalTransition:
        with pytest.raises(IllegalTransition):
            readers.on(7, event)
        after = None
    else:
        assert readers.on(7, event) is (after is not None)
    assert readers.state(7) is (after or state)
    assert readers.state(8) is R.UNKNOWN, "another reader has moved"


def test_a_reader_that_says_less_of_its_siblings_later_counts_as_it_did() -> None:
    readers = Readers()
    readers.on(7, E.WANT, 2)
    readers.on(7, E.SETTLE)
    assert not readers.enough(1)
    readers.on(8, E.DROP, 2)
    assert readers.enough(1)
    assert not readers.enough(1, (R.DELIVERED,))
