"""No sentence has to be read twice: words that are kept out, and a bound on length, for all prose of the project."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.prose import prose, sentences

MAX_WORDS = 48
WORDS = {
    r"\banew\b": "again",
    r"\bwho(m)?ever\b": "the peer that ..., anybody who ...",
    r"\bso many\b": "this number, or the name of the argument",
    r"\bof late\b": "recently",
    r"\bamid\b": "during",
    r"\bfor good\b": "for ever, or what does not come back",
    r"\bin turn\b": "one after the other",
    r",\s+since\b": "because, for a reason",
    r"\b(he|his|him)\b": "the peer, the process, the operator",
    r"\bhas its way\b": "takes precedence",
    r"\b(at the wrong door|costs the right one)\b": "say what happens, without a metaphor",
    r"\bneighbour's door\b": "say what happens, without a metaphor",
    r"\b(scheduler|worker) hal(f|ves)\b": "scheduler side, worker side",
    r"(?<!network )(?<!graphics )\bcards?\b": "descriptor, or network card",
    r"\b(a|an|the|its|their|each|every|no|any|early) wants?\b(?! (to|for)\b)": "fetch request",
    r"\bwants, drops\b": "fetch requests, declines",
}
"""What is kept out, as a pattern, and what to write instead."""


@pytest.mark.parametrize("pattern", WORDS)
def test_a_word_is_kept_out(pattern: str) -> None:
    found = [(place, text) for place, text in prose() if re.search(pattern, text, re.I)]
    assert not found, f"write instead: {WORDS[pattern]}"


def test_no_sentence_is_too_long() -> None:
    found = [(place, s) for place, text in prose() for s in sentences(text) if len(s.split()) > MAX_WORDS]
    assert not found, f"at most {MAX_WORDS} words, in most sentences 25"


def test_a_cell_of_a_table_holds_one_fact() -> None:
    found = [(place, text) for place, text in prose() if place.endswith("(cell)") and text.count(";") >= 3]
    assert not found, "make it several rows, or a sentence below the table"


HABITS = {
    r"computed (here|where it is)": "the decode engine prefills it itself, it is recomputed",
    r"\b(all the same|in vain|for want of|for ever|likewise|lately|meanwhile)\b": "anyway, without success, also, recently, while",
    r"\bmade-up\b": "random",
    r"\b(stands|stand) (beside|at|on|in|there)\b": "is, is listed",
}
"""Of pages for users only: the habits that cost a reader most, and what to write instead."""
PAGES = (
    "README",
    "docs/index",
    "docs/why",
    "docs/fit-a-stack",
    "docs/recipes",
    "docs/choose",
    "docs/conversations",
    "docs/secure",
    "docs/performance",
    "docs/backends",
    "docs/connect",
    "docs/library",
    "docs/sglang",
    "docs/status",
    "docs/trust",
    "docs/ports",
    "docs/router",
)


@pytest.mark.parametrize("pattern", HABITS)
def test_pages_for_users_are_free_of_a_habit(pattern: str) -> None:
    found = [(place, text) for place, text in prose() if place.startswith(PAGES) and re.search(pattern, text, re.I)]
    assert not found, f"write instead: {HABITS[pattern]}"


def test_pages_have_no_more_words_than_people_read() -> None:
    path = Path(__file__).parents[2] / "docs" / "words.py"
    spec = importlib.util.spec_from_file_location("words", path)
    assert spec and spec.loader
    words = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(words)
    assert sum(map(words.by_hand, words.pages())) <= words.MOST
