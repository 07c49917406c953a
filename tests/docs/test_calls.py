"""Each call of the two sides, each of their arguments and each word of an update stands in the page for authors of engines."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import pytest

from kvxfer import Agent, engine
from kvxfer.engine import SchedulerSide, Update, WorkerSide
from kvxfer.engine.loads import Loads
from kvxfer.engine.offers import Offers

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


SIDES: tuple[type, ...] = (SchedulerSide, WorkerSide, Offers, Loads, Agent)


def calls() -> Iterator[ast.Call]:
    """What stands in code as a call of one of the sides. ``name=`` stands for a value under that name."""
    for span in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", GUIDES, flags=re.S)):
        with suppress(SyntaxError):
            found = ast.parse(span.replace("=)", "=0)"), mode="eval").body
            if isinstance(found, ast.Call) and any(hasattr(side, _called(found)) for side in SIDES):
                yield found


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _can_be_made(function: Callable[..., object], call: ast.Call) -> bool:
    """Return whether a call has what it needs, and arguments that are named stand at their places; ``...`` stands for some."""
    signature, named = inspect.signature(function), {one.arg: one for one in call.keywords if one.arg}
    names = [name for name in signature.parameters if name != "self"]
    if any(isinstance(one, ast.Constant) and one.value is ... for one in call.args):
        return named.keys() <= set(names)
    try:
        bound = signature.bind(None, *call.args, **named)
    except TypeError:
        return False
    ids = {name: getattr(one, "id", name) for name, one in bound.arguments.items()}
    return all(given == name or given not in names for name, given in ids.items())


def test_calls_can_be_made_as_they_stand() -> None:
    wrong = [
        ast.unparse(call)
        for call in calls()
        if not any(_can_be_made(getattr(side, _called(call)), call) for side in SIDES if hasattr(side, _called(call)))
    ]
    assert not wrong


def test_what_is_named_for_a_feature_is_there() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.partition("## By feature")[2], re.M)
    names = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert names and not {name for name in names if not any(hasattr(side, name.rpartition(".")[2]) for side in SIDES)}


def test_each_public_name_is_in_a_guide() -> None:
    of_steps = {"BlockCopy", "ChannelAddress", "BlockPool"}  # what a step or a pool has, which nobody makes or calls
    assert set(engine.__all__) - of_steps <= words(GUIDES)
