"""Each call of the two sides, each of their arguments and each word of an update stands in the page for authors of engines."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvxfer import engine
from kvxfer.engine import SchedulerSide, Update, WorkerSide

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "connect-an-engine.md").read_text()
GUIDES = PAGE + (DOCS / "library.md").read_text()


def words(text: str) -> set[str]:
    """What stands in code, in the text or in programs."""
    return set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`]+`", text, re.S))))


@pytest.mark.parametrize("side", [SchedulerSide, WorkerSide], ids=lambda side: side.__name__)
def test_each_call_is_explained(side: type) -> None:
    assert {name for name in dir(side) if not name.startswith("_")} <= words(PAGE)


@pytest.mark.parametrize("side", [SchedulerSide, WorkerSide], ids=lambda side: side.__name__)
def test_each_argument_of_a_side_is_named(side: type) -> None:
    assert set(inspect.signature(side).parameters) <= words(PAGE)


def test_each_word_of_an_update_is_explained() -> None:
    assert {field.name for field in fields(Update)} <= words(PAGE)


def test_each_public_name_is_in_a_guide() -> None:
    of_steps = {"BlockCopy", "ChannelAddress", "BlockPool"}  # what a step or a pool has, which nobody makes or calls
    assert set(engine.__all__) - of_steps <= words(GUIDES)


@pytest.mark.parametrize("title", ["groups", "a row for each request"])
def test_the_example_is_of_a_cache(title: str) -> None:
    (program,) = re.findall(rf'```python title="{title}"\n(.*?)```', PAGE, re.S)
    found: dict[str, object] = {}
    exec(program, found)
    found["cache"].check()  # type: ignore[attr-defined]


def test_the_example_of_what_is_held_finds_it() -> None:
    (program,) = re.findall(r'```python title="holds"\n(.*?)```', PAGE, re.S)
    exec(program, {})


def test_the_example_of_pools_numbers_blocks_back() -> None:
    (program,) = re.findall(r'```python title="a pool for each group"\n(.*?)```', PAGE, re.S)
    exec(program, {})
