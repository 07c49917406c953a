"""What a call raises stands in the section *Raises* of its docstring, where an editor and the reference show it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    file
    for pattern in ("kvxfer", "backends/*/kvxfer_*", "connectors/*/kvxfer_*", "benchmarks/kvxfer_bench", "testing")
    for top in ROOT.glob(pattern)
    for file in top.rglob("*.py")
    if "conformance" not in file.parts  # whose docstrings are the rules that its clauses prove
)
IN_PROSE = re.compile(r"\b[Rr]aises? `{0,2}[A-Z]\w*(Error|Broken|Violation)\b|\b[Rr]aises? what\b")
NOBODY_CATCHES = {"NotImplementedError", "AssertionError"}
"""What an abstract method or a state that cannot be raises is nothing for a caller to prepare for."""


def documented(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """Yield the public calls that have a docstring: name, definition, docstring. A class's counts for its constructor."""
    for scope in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        prefix = "" if isinstance(scope, ast.Module) else f"{scope.name}."
        if prefix.startswith("_"):
            continue
        for node in scope.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            doc = ast.get_docstring(node) or ""
            if node.name == "__init__":
                doc += "\n\n" + (ast.get_docstring(scope) or "")
            elif node.name.startswith("_"):
                continue
            if doc.strip():
                yield prefix + node.name, node, doc


def raised(call: ast.FunctionDef) -> set[str]:
    """Return the names of what a call itself raises."""
    found, left = set(), list[ast.AST](call.body)
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name):
            found.add(node.exc.func.id)
        left += ast.iter_child_nodes(node)
    return found - NOBODY_CATCHES


def is_command(call: ast.FunctionDef) -> bool:
    """Return whether this is a command, whose docstring is its help: how it fails is for the shell."""
    return "typer." in ast.unparse(call.args) or any("command" in ast.unparse(d) for d in call.decorator_list)


def is_transport(tree: ast.Module, name: str) -> bool:
    """Return whether this makes a back end: what that raises is in the contract, for all of them."""
    scope = next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and f"{node.name}.__init__" == name), None
    )
    return scope is not None and any(re.match(r"Transport|Base\b", ast.unparse(base)) for base in scope.bases)


def complaints(source: str) -> list[str]:
    """Return what is wrong in the text of a module."""
    tree, out = ast.parse(source), []
    for name, call, doc in documented(tree):
        if IN_PROSE.search(doc.partition("Raises:\n")[0]):
            out.append(f"line {call.lineno}: {name} says in prose what it raises")
        if "Raises:\n" in doc or is_command(call) or is_transport(tree, name):
            continue
        if what := raised(call):
            out.append(f"line {call.lineno}: {name} raises {', '.join(sorted(what))}, and its docstring has no Raises")
    return out


def test_what_a_call_raises_stands_in_its_section() -> None:
    wrong = [f"{file.relative_to(ROOT)}, {one}" for file in FILES for one in complaints(file.read_text())]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "source",
    [
        'def read(x):\n    """Read. Raises ``ConfigError`` for what is none."""\n',
        'def read(x):\n    """Read."""\n    raise ConfigError("none")\n',
        'class A:\n    """An A."""\n\n    def __init__(self):\n        raise ConfigError("none")\n',
    ],
)
def test_the_check_finds_what_it_is_for(source: str) -> None:
    assert complaints(source)
