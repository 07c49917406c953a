"""Each promise of the page of guarantees names what tests it, and all of that is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
TABLE = PAGE.partition("| tested by |\n")[2].partition("\n\n")[0].splitlines()[1:]
ROWS = {promise.strip()[:50]: tested for _, promise, _, tested, _ in (row.split("|") for row in TABLE)}
BY_HAND = ("kvxfer bench adversary", "kvxfer bench soak", "kvxfer bench chaos", "kvxfer demo --chaos", "make fuzz")


def named(tested: str) -> list[Path]:
    """The files and folders of tests that a cell names; one without a folder lies where the one before it does, or is unique."""
    found: list[Path] = []
    for name in re.findall(r"`((?:tests/[\w/]*|test_)\w*(?:\.py|/))`", tested):
        beside = found[-1].parent / name if found else ROOT / name
        there = [ROOT / name] if "/" in name else [beside] if beside.exists() else list((ROOT / "tests").rglob(name))
        assert len(there) == 1 and there[0].exists(), f"{name} is {len(there)} files"
        found += there
    return found


def collected(path: Path) -> int:
    """How many tests a file or folder has, as pytest collects them."""
    files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
    names = [
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    return sum(name.startswith("test_") for name in names)


def test_the_table_is_read() -> None:
    assert len(ROWS) > 20 and all(row.count("|") == 4 for row in TABLE)


@pytest.mark.parametrize("promise", ROWS)
def test_what_tests_a_promise_is_there(promise: str) -> None:
    tested = ROWS[promise]
    files = named(tested)
    assert all(collected(file) for file in files)
    commands = re.findall(r"`((?:make|kvxfer) [^`]*)`", tested)
    assert files or commands or tested.strip() == "the same"
    for command in commands:
        assert command.startswith(BY_HAND), command
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
