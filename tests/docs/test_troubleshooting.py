"""Each text that docs/troubleshooting.md quotes stands in the code, and each kind of failure has its section."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvxfer.failures import FailureKind

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = [
    re.match(r"\| `(.+?)` \|", line)[1]  # type: ignore[index]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| what it says |")
]


def _template(node: ast.AST) -> Iterator[str]:
    """Yield a string of the code as the page writes it: what is put in at run time is `…`."""
    match node:
        case ast.JoinedStr():
            yield "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
        case ast.Constant(value=str() as text):
            yield re.sub(r"%[-.\w]*[dgfrs]|\{!?[rs]?\}", "…", text)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (a + b for a in _template(left) for b in _template(right))


@cache
def _texts() -> str:
    code = [
        file for folder in ("kvxfer", "backends", "benchmarks", "connectors") for file in (ROOT / folder).rglob("*.py")
    ]
    trees = [ast.parse(file.read_text()) for file in code]
    return "\n".join(text.replace("\n", " ") for tree in trees for node in ast.walk(tree) for text in _template(node))


@pytest.mark.parametrize("quoted", QUOTED)
def test_what_is_quoted_is_what_the_code_says(quoted: str) -> None:
    assert quoted in _texts()


def test_each_kind_of_failure_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE, re.M)
    assert sections == [kind.value for kind in FailureKind]
