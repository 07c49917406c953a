"""Each promise of the page of guarantees has a claim, a bound and faults, and names tests that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
PROMISES = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##)", PAGE, re.M | re.S))
BY_HAND = ("kvxfer bench soak", "kvxfer bench chaos", "make fleet", "make fuzz")


def point(promise: str, name: str) -> str:
    """Return what a promise says after a point's name."""
    (text,) = re.findall(rf"^\* {name}: (.*?)(?=^\* |\Z)", PROMISES[promise], re.M | re.S)
    return " ".join(text.split())


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


def test_the_page_is_read() -> None:
    assert len(PROMISES) > 25 and "tests/" not in PAGE.partition("## Every transfer ends")[0]


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_has_a_claim_a_bound_and_faults(promise: str) -> None:
    claim = PROMISES[promise].partition("\n* ")[0].strip()
    assert claim.endswith(".") and point(promise, "Bound").endswith(".") and point(promise, "Under").endswith(".")


@pytest.mark.parametrize("promise", PROMISES)
def test_what_tests_a_promise_is_there(promise: str) -> None:
    tested = point(promise, "Tested by")
    files = [ROOT / name for name in re.findall(r"`((?:tests/|test_)[\w/.]*)`", tested)]
    assert all(file.exists() and collected(file) for file in files), files
    commands = re.findall(r"`((?:make|kvxfer) [^`]*)`", tested)
    assert files or commands
    for command in commands:
        assert command.startswith(BY_HAND), command
        if command.startswith("make "):
            assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
