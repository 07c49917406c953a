"""The transfer that docs/protocol.md follows goes as the page says, message by message."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from kvxfer.protocol import messages as m

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()


def rows(title: str) -> list[list[str]]:
    """Return the cells of the first table under a heading."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_each_message_has_its_row() -> None:
    assert {kind.__name__ for kind in get_args(m.Message)} == {row[0].strip("`") for row in rows("Messages")}


def test_the_states_of_the_example_are_those_of_the_tables() -> None:
    generated = "".join(re.findall(r"^\| state \| on \| becomes \|$.*?\n\n", PAGE, re.M | re.S))
    states = {word for row in re.findall(r"^\| (\w+) \|.*\| (\w+) \|$", generated, re.M) for word in row}
    cells = [cell for row in rows("One transfer, followed to its end") for cell in row[3:]]
    named = {state.strip() for cell in cells for state in cell.split(", then")}
    assert named - {""} <= states
