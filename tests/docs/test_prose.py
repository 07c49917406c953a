"""No sentence has to be read twice: a list of words that are kept out, and a bound on length, for all prose of the project."""

from __future__ import annotations

import re

import pytest

from tests.docs.prose import prose, sentences

MAX_WORDS = 48
WORDS = {
    r"\banew\b": "again",
    r"\bwho(m)?ever\b": "name who: the peer that ..., any process that ...",
    r"\bso many\b": "the number",
    r"\bof late\b": "recently",
    r"\bamid\b": "during",
}
"""What is kept out, as a pattern, and what to write instead."""

LEFT = {r"\banew\b": 62, r"\bwho(m)?ever\b": 85, r"\bso many\b": 114, r"\bof late\b": 1, r"\bamid\b": 18}
LONG = 61
CROWDED = 11


@pytest.mark.parametrize("pattern", WORDS)
def test_a_word_is_kept_out(pattern: str) -> None:
    found = [(place, text) for place, text in prose() if re.search(pattern, text, re.I)]
    assert len(found) <= LEFT.get(pattern, 0), (WORDS[pattern], found)


def test_no_sentence_is_too_long() -> None:
    found = [(place, s) for place, text in prose() for s in sentences(text) if len(s.split()) > MAX_WORDS]
    assert len(found) <= LONG, found


def test_a_cell_of_a_table_holds_one_fact() -> None:
    found = [(place, text) for place, text in prose() if place.endswith("(cell)") and text.count(";") >= 3]
    assert len(found) <= CROWDED, found
