"""Each text that docs/troubleshooting.md quotes stands in the code, and each kind of failure has its section."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvxfer.failures import FailureKind
from tests.docs.prose import template

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [
    re.match(r"\| `(.+?)` \|", line)[1]  # type: ignore[index]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what it says |")
]


@cache
def _texts() -> str:
    code = [
        file
        for folder in ("kvxfer", "backends", "benchmarks", "connectors", "testing")
        for file in (ROOT / folder).rglob("*.py")
    ]
    trees = [ast.parse(file.read_text()) for file in code]
    return "\n".join(text.replace("\n", " ") for tree in trees for node in ast.walk(tree) for text in template(node))


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_what_the_code_says(quoted: str) -> None:
    assert quoted in _texts()


def test_each_kind_of_failure_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE, re.M)
    assert sections == [kind.value for kind in FailureKind]


SAYS = {"Failure", "PeerError", "TransportError", "about", "error", "fail", "unlinkable", "warning", "_complain"}
"""What takes a text for an operator."""
QUIET = ("testing", "cli", "demo", "transfer")
"""Folders of programs that say what they have to say to whoever has started them."""

WRONG_CALL = {
    "back end … has no …; it offers …",
    "back end … says that batch … has …, but no such batch is in flight: each accepted batch must end exactly once",
    "back end … takes no plans: its capabilities are not factored",
    "both endpoints are the same; connect needs one from each side",
    "memory … is not registered",
    "memory … is used by a batch in flight: abort it, or wait for its end",
    "memory … is used by a batch that failed and is not quiet: wait until it is, or close the back end",
    "memory … has no regions",
    "run … (offset …, … bytes) is outside the regions of memory …",
    "stream … comes too late on link …: their numbers must rise",
    "the first argument of connect must be an unused endpoint of this transport",
    "the transport of … belongs to another thread, which is still alive",
    "the transport of … belongs to the thread that made it",
    "… and … overlap",
    "… is not a piece of memory: address and size must be positive",
    "… offsets and … lengths: each run needs one of each",
    "a … needs a remote offset for each run",
    "a READ needs one remote offset a run",
    "a read or write needs offsets in the peer's memory, or a plan",
    "back end 'nixl' moves memory on 'cpu' or 'cuda:N', not on …",
    "memory … is not registered, or has no regions",
    "memory … was registered after the link to … was made",
    "one memory is on one GPU, not on …",
    "the endpoint of peer … is in use; it must call endpoint() for every link",
    "the first memory of a GPU has to be registered before the first endpoint is made",
    "the regions of one memory must lie on one device, not on …",
    "… does not lie within one allocation of …",
    "… has no memory …",
    "… is no device: expected cuda:N",
    "… lends no memory …",
}
"""What a back end says to a program that does not keep the contract: its author reads it in a traceback."""
JOINT = {
    " (… more were not logged)",
    "a key is set",
    "other hosts can reach …",
    "… …",
    "at …: …",
    "on the side of …: …",
    "request … …",
}
"""What joins other texts."""
INTERNAL = {
    "it ended earlier": "a command to a part that has ended; nobody waits for the answer",
    "it was given up": "a checksum that nobody waits for",
    "a batch for … did not end within … s of its abort; closing its link": "the failure that follows says it to the request",
}
"""What stands in no failure, by the reason."""


def _choices(node: ast.expr, assigned: dict[str, list[ast.expr]]) -> Iterator[ast.expr]:
    """Yield what an argument may be: itself, either side of a condition, or what its variable was set to."""
    match node:
        case ast.IfExp():
            yield from _choices(node.body, {})
            yield from _choices(node.orelse, {})
        case ast.Name():
            for value in assigned.get(node.id, ()):
                yield from _choices(value, {})
        case _:
            yield node


def _calls(tree: ast.AST, assigned: dict[str, list[ast.expr]]) -> Iterator[tuple[ast.Call, dict[str, list[ast.expr]]]]:
    """Yield each call, with what the variables of its function are set to."""
    for node in ast.iter_child_nodes(tree):
        inside = assigned
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = {}
            for one in ast.walk(node):
                if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name):
                    inside.setdefault(one.targets[0].id, []).append(one.value)
        if isinstance(node, ast.Call):
            yield node, inside
        yield from _calls(node, inside)


def _said() -> Iterator[tuple[str, str]]:
    """Yield (place, text) of what the product may say to an operator."""
    for folder in ("kvxfer", "backends", "connectors"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if set(QUIET) & set(file.parts) or file.stem in QUIET:
                continue
            for call, assigned in _calls(ast.parse(file.read_text()), {}):
                if _name(call.func) in SAYS:
                    place = f"{file.relative_to(ROOT)}:{call.lineno}"
                    choices = (one for argument in call.args[:3] for one in _choices(argument, assigned))
                    yield from ((place, t) for one in choices for t in template(one) if " " in t)


def _name(function: ast.expr) -> str:
    return getattr(function, "id", getattr(function, "attr", ""))


def test_what_the_code_says_has_its_row_or_is_declared_internal() -> None:
    said = {text: place for place, text in _said()}
    assert len(said) > 200
    assert {place.partition("/")[0] for place in said.values()} == {"kvxfer", "backends", "connectors"}
    declared = WRONG_CALL | JOINT | INTERNAL.keys()
    assert not declared - said.keys(), "each of these is still said"
    silent = {
        text: place
        for text, place in said.items()
        if text not in declared and not any(quoted in text or text.strip(" :;") in quoted for quoted in QUOTED)
    }
    assert not silent, "say in docs/troubleshooting.md what to do about each of these"
