"""One name for one thing: no two public names alike, and no word that the glossary has given up."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NewType, get_args, get_type_hints

from kvxfer import Fetch, Offer, Released, TransferId
from kvxfer.protocol.messages import PartReady

ROOT = Path(__file__).parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"

FILE_PLAN = {
    "Connection": "what carries a link",
    "Endpoint": "what a link tells the other side",
    "Library": "the wrapped library",
    "Link": "a connection",
    "Options": "its options",
}
"""Names that each back end has, once, by the file plan that all of them share; what a name stands for there."""

FUNCTIONS = {
    "check": "called as a function of its module, which says what is checked",
    "decode": "called as a function of a module that is one codec",
    "encode": "called as a function of a module that is one codec",
    "load": "called as a function of its module, which says what is loaded",
    "measure": "the body of a benchmark, one a module",
}
"""Functions that are only called with their module's name before them, and why the name is shared."""

LEFT: dict[str, str] = {
    "compare": "a demo of prompts, and a benchmark of settings; no module meets both",
    "Broken": "what ends one direction of a link, and in a suite a fence of a device that has failed; no module meets both",
    "told_address": "what doctor prints of the settings, and what the settings make of a name; each is called in its place",
    "Server": "the vLLM server that the demo starts, and inside two back ends who answers reads; no module meets both",
}
"""Names that are defined more than once all the same, and why. The list is exact: whoever renames one takes it out."""

GIVEN_UP: set[str] = set()
"""Words from the glossary's column *not called* that are still public names. Exact as well."""

TO_COME: set[str] = set()


def _distributions() -> Iterator[Path]:
    yield ROOT / "kvxfer"
    yield from sorted(ROOT.glob("backends/*/kvxfer_*"))
    yield from sorted(ROOT.glob("connectors/*/kvxfer_*"))
    yield ROOT / "benchmarks" / "kvxfer_bench"
    yield ROOT / "testing"


@cache
def _defined() -> dict[str, list[Path]]:
    found = defaultdict(list)
    for top in _distributions():
        for file in sorted(top.rglob("*.py")):
            names = {
                node.name
                for node in ast.parse(file.read_text()).body
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_"
            }
            for name in names:
                found[name].append(file.relative_to(ROOT))
    return found


@cache
def _rows() -> list[list[str]]:
    """Return the glossary's rows: word, meaning, in kvxfer, not called."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("| word |")]


def _in_plan(name: str, files: list[Path]) -> bool:
    """Return whether these are a name of the file plan, in back ends (the testing ones included) and once in each."""
    tops = Counter(file.parts[:2] for file in files if file.parts[0] == "backends")
    elsewhere = [file for file in files if file.parts[0] != "backends" and "testing" not in file.parts]
    return name in FILE_PLAN and not elsewhere and max(tops.values()) == 1


def _apart(files: list[Path]) -> bool:
    """Return whether these stand in back ends alone, one in each: nobody meets the names of two back ends at once."""
    tops = Counter(file.parts[:2] for file in files)
    return all(top[0] == "backends" for top in tops) and max(tops.values()) == 1


def test_no_two_public_names_are_alike() -> None:
    several = {name: files for name, files in _defined().items() if len(files) > 1 and not _apart(files)}
    alike = {name for name, files in several.items() if name not in FUNCTIONS and not _in_plan(name, files)}
    new = {name: [str(file) for file in several[name]] for name in alike - LEFT.keys()}
    assert not new, "rename one of each, or give a reason above"
    assert not LEFT.keys() - alike, "take these out of LEFT"


def test_names_of_the_file_plan_are_used() -> None:
    for name in FILE_PLAN:
        assert len(_defined()[name]) > 1, f"{name} need not be listed any more"


def test_shared_functions_are_shared() -> None:
    for name in FUNCTIONS:
        files = _defined()[name]
        assert len(files) > 1, f"{name} need not be listed any more"
        assert name[0].islower()


def test_words_that_were_given_up_are_no_public_names() -> None:
    words = {word for row in _rows() for word in re.findall(r"`([^`]+)`", row[3])}
    given_up = words & _defined().keys()
    assert not given_up - GIVEN_UP, "use the glossary's word"
    assert not GIVEN_UP - given_up, "take these out of GIVEN_UP"


def test_each_word_of_the_glossary_stands_there_once() -> None:
    words = [word.strip() for row in _rows() for word in row[0].split(",")]
    assert words == list(dict.fromkeys(words))
    assert all(len(row) == 4 and row[1] for row in _rows())


def test_the_glossary_names_what_the_code_has() -> None:
    code = "\n".join(file.read_text() for top in _distributions() for file in top.rglob("*.py"))
    identifiers = set(re.findall(r"\w+", code))
    named = {name for row in _rows() for name in re.findall(r"`([^`]+)`", row[2])}
    lacking = named - identifiers
    assert not lacking - TO_COME, "the glossary names what is not there"
    assert not TO_COME - lacking, "take these out of TO_COME"


def _annotations(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and the type of each annotated argument, field and variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            yield getattr(node.target, "id", getattr(node.target, "attr", "")), node.annotation


def test_generations_and_handles_have_types_of_their_own() -> None:
    """So that a type checker finds a generation where a number of tokens is meant, or one request's name where another's is."""
    bare = {"generation": "int", "handle": "str"}
    found = {
        f"{file.relative_to(ROOT)}: {name}: {ast.unparse(annotation)}"
        for top in _distributions()
        for file in top.rglob("*.py")
        for name, annotation in _annotations(ast.parse(file.read_text()))
        if re.search(rf"\b{bare.get(name.strip('_'), '!')}\b", ast.unparse(annotation))
    }
    assert not found
    fields = {TransferId: "base", Offer: "generation", Fetch: "handle", Released: "handle", PartReady: "generation"}
    for cls, field in fields.items():
        assert any(isinstance(kind, NewType) for kind in _kinds(get_type_hints(cls)[field])), f"{cls.__name__}.{field}"


def _kinds(annotation: Any) -> tuple[Any, ...]:
    return annotation, *get_args(annotation)
