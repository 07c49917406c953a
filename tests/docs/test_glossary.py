"""The glossary covers the prose: its words are used, the words that it gives up are not, and terms that pages stress have a row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.prose import prose

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| word |")
]
WORDS = {word.strip().lower() for row in ROWS for word in row[0].split(",")}
GIVEN_UP = {
    " ".join(re.findall("[A-Z]?[a-z]+", word)).lower() for row in ROWS for word in re.findall(r"`(\w+)`", row[3])
}
ORDINARY = {
    "member",
    "card",
    "check",
    "claim",
    "giving",
    "gone",
    "have",
    "holds",
    "offered",
    "offered blocks",
    "settle",
    "taken",
    "taking",
    "template",
    "terms",
    "verdict",
    "want",
}
"""Words that the glossary gives up for its own things, and that sentences need; ``test_prose.py`` looks for the last in its sense."""
ELSEWHERE = {
    "half": "on the page for authors of back ends",
    "view group": "explained there",
    "cells": "of a picture on its page",
    "not": "stress",
    "one": "stress",
    "key": "on the page of `cma`, of a link",
    "kind": "on the page of spaces",
    "library": "on the page of figures",
    "last prompt token": "explained there",
    "process": "stress",
    "line": "on the page for authors of back ends",
    "pattern": "copy pattern",
    "quiet later": "an earlier name, in a decision",
    "raw": "a column of figures",
    "sockets": "a column of figures",
    "spec": "vLLM's",
    "transport": "session",
    "vault": "the example's",
    "visible at the target": "explained there",
    "begun": "a message",
}


def stressed() -> dict[str, str]:
    """Return each term that a page puts in italics where it says what that is, and the page."""
    found = {}
    for page in DOCS.rglob("*.md"):
        text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.M | re.S)
        for term in re.findall(
            r"(?:\b[Aa]n?|[Tt]he|are|is|[Aa]re called|in) (?<![*\w])\*([a-z][a-z -]{2,30})\*(?![*\w])", text
        ):
            found[term] = page.name
    return found


@pytest.mark.parametrize("phrase", sorted(GIVEN_UP - ORDINARY))
def test_a_word_that_was_given_up_is_not_used(phrase: str) -> None:
    pattern = re.compile(rf"\b{phrase}s?\b", re.I)
    assert not [(place, text) for place, text in prose() if pattern.search(text)], "use the glossary's word"


def test_the_list_of_ordinary_words_is_exact() -> None:
    assert ORDINARY <= GIVEN_UP, "take these out"


def test_each_word_of_the_glossary_is_used() -> None:
    """In prose, or as a name in the code, which ``tests/test_names.py`` looks for."""
    words = {word.strip().lower() for row in ROWS if "`" not in row[2] for word in row[0].split(",")}
    texts = "\n".join(text for place, text in prose() if not place.startswith("docs/glossary")).lower()
    assert not {word for word in words if not re.search(rf"\b{word}(s|es)?\b", texts)}


def test_a_term_that_a_page_stresses_has_its_row() -> None:
    singular = {term: term.removesuffix("s") for term in stressed()}
    lacking = {t for t, s in singular.items() if not {t, s} & WORDS and not {t, s} & ELSEWHERE.keys()}
    assert not lacking, {term: stressed()[term] for term in lacking}
