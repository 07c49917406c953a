"""The glossary covers the code and the prose: its words are used, and the words that it gives up are not."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.prose import prose
from tests.test_structure import trees

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (DOCS / "glossary.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| word |")
]
WORDS = [word.strip().lower() for row in ROWS for word in row[0].split(",")]
GIVEN_UP = {word for row in ROWS for word in re.findall(r"`(\w+)`", row[3])}
ORDINARY = set(
    "member card check claim giving gone have holds offered settle taken taking template terms verdict want".split()
) | {"offered blocks"}
"""Words that the glossary gives up for its own things, and that sentences need; ``lint.py`` looks for the last in its sense."""


def test_a_word_that_was_given_up_is_not_used() -> None:
    code = {name for tree in trees().values() for node in tree.body if (name := getattr(node, "name", ""))}
    assert not GIVEN_UP & code, "use the glossary's word"
    phrases = {" ".join(re.findall("[A-Z]?[a-z]+", word)).lower() for word in GIVEN_UP} - ORDINARY
    pattern = re.compile(rf"\b({'|'.join(sorted(phrases))})s?\b", re.I)
    assert not [(place, text) for place, text in prose() if pattern.search(text)], "use the glossary's word"


def test_each_word_is_there_once_and_used() -> None:
    """In prose, or as a name in the code."""
    assert WORDS == list(dict.fromkeys(WORDS)) and all(len(row) == 4 and row[1] for row in ROWS)
    identifiers = {word for file in trees() for word in re.findall(r"\w+", file.read_text())}
    assert {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[2])} <= identifiers
    texts = "\n".join(text for place, text in prose() if not place.startswith("docs/glossary")).lower()
    words = {word.strip().lower() for row in ROWS if "`" not in row[2] for word in row[0].split(",")}
    assert not {word for word in words if not re.search(rf"\b{word}(s|es)?\b", texts)}
