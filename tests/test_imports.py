"""Arrows between modules: none closes a circle, so each module can be understood by what lies below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@cache
def _modules() -> dict[str, Path]:
    """Return the product's modules by name."""
    found = {}
    for top in (ROOT / "kvxfer", *ROOT.glob("backends/*/kvxfer_*"), *ROOT.glob("connectors/*/kvxfer_*")):
        for file in top.rglob("*.py"):
            path = file.relative_to(top.parent).with_suffix("")
            found[".".join(path.parts).removesuffix(".__init__")] = file
    return found


def _imported(name: str, source: str, modules: set[str]) -> Iterator[str]:
    """Yield the modules that a module imports: anywhere in it, in functions and for types alone as well."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in modules else str(node.module)


def _circle(sources: dict[str, str]) -> list[str]:
    """Return modules that import each other in a circle, the first also last; none if there is no circle."""
    arrows = {name: set(_imported(name, source, set(sources))) - {name} for name, source in sources.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as e:
        return list(e.args[1])
    return []


def test_no_modules_import_each_other_in_a_circle() -> None:
    circle = _circle({name: file.read_text() for name, file in _modules().items()})
    assert not circle, " <- ".join(circle)


@pytest.mark.parametrize(
    "back",
    [
        "import a",
        "from a import thing",
        "def f():\n    from a import thing",
        "if TYPE_CHECKING:\n    from a import thing",
    ],
)
def test_every_import_is_an_arrow(back: str) -> None:
    assert _circle({"a": "from b.c import thing", "b": "", "b.c": back}) == ["a", "b.c", "a"]
    assert not _circle({"a": "from b import c", "b": "", "b.c": "import os"})
