"""The reference pages say what the code says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_map_of_the_tree_is_the_tree() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    shown = {name.strip(" /") for line in re.findall(r"^  (\S.*?)  ", tree, re.M) for name in line.split(",")}
    core = DOCS.parent / "kvxfer"
    there = {path.stem for path in core.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()} - {
        "__init__"
    }
    assert shown == there


@pytest.mark.parametrize(
    "page", ["engine-room.md", "connect-an-engine.md", "architecture.md", "design.md", "protocol.md"]
)
def test_what_a_page_names_in_the_code_is_there(page: str) -> None:
    folders = ("kvxfer", "backends", "benchmarks", "connectors", "testing")
    code = "\n".join(file.read_text() for folder in folders for file in (DOCS.parent / folder).rglob("*.py"))
    identifiers = set(re.findall(r"\w+", code)) | {
        file.stem for folder in folders for file in (DOCS.parent / folder).rglob("*")
    }
    named = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", (DOCS / page).read_text()))
    assert not {
        name
        for name in named
        if not set(name.split(".")) - {"py", "md"} <= identifiers and not name.endswith((".yml", ".toml"))
    }


def test_the_design_names_each_thread() -> None:
    made = {"NamedThread", "Worker", "CopyPool"}
    found: set[str] = set()
    for file in (DOCS.parent / "kvxfer").rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in made:
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                found |= {x.value for x in given if isinstance(x, ast.Constant) and str(x.value).startswith("kvxfer-")}
    page = (DOCS / "design.md").read_text()
    assert found and not {name for name in found if f"`{name}`" not in page}
