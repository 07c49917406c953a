"""Each promise of the page of guarantees has a claim, a bound and faults, and names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
PROMISES = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##)", PAGE, re.M | re.S))
BY_HAND = ("kvxfer bench soak", "kvxfer bench chaos", "make fleet", "make fuzz")


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_has_a_claim_a_bound_and_faults_and_is_tested(promise: str) -> None:
    assert len(PROMISES) > 25 and PROMISES[promise].partition("\n* ")[0].strip().endswith(".")
    points = dict(re.findall(r"^\* ([\w ]+): (.*?)(?=^\* |\Z)", PROMISES[promise], re.M | re.S))
    assert points["Bound"].strip().endswith(".") and points["Under"].strip().endswith(".")
    files = [ROOT / name for name in re.findall(r"`((?:tests/|test_)[\w/.]*)`", points["Tested by"])]
    commands = re.findall(r"`((?:make|kvxfer) [^`]*)`", points["Tested by"])
    assert (files or commands) and all(command.startswith(BY_HAND) for command in commands)
    for file in files:
        texts = [one.read_text() for one in (file.rglob("test_*.py") if file.is_dir() else [file])]
        assert any("def test_" in text or ".TestCase" in text for text in texts), file
