"""The reference pages name what the code has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.test_structure import trees

DOCS = Path(__file__).parents[2] / "docs"


def test_the_map_of_the_tree_is_the_tree() -> None:
    (tree,) = re.findall(r"```text\n(.*?)```", (DOCS / "architecture.md").read_text(), re.DOTALL)
    shown = {name.strip(" /") for line in re.findall(r"^  (\S.*?)  ", tree, re.M) for name in line.split(",")}
    core = DOCS.parent / "kvxfer"
    parts = {path.stem for path in core.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert shown == parts - {"__init__"}


@pytest.mark.parametrize(
    "page", ["engine-room.md", "connect-an-engine.md", "architecture.md", "design.md", "protocol.md"]
)
def test_what_a_page_names_in_the_code_is_there(page: str) -> None:
    identifiers = {word for file in trees() for word in re.findall(r"\w+", file.read_text())}
    identifiers |= {one.stem for file in trees() for one in (file, *file.parents)} | {"py", "md"}
    named = set(re.findall(r"`([A-Za-z_][\w.]*)(?:\(.*?\))?`", (DOCS / page).read_text()))
    assert not {n for n in named if not n.endswith((".yml", ".toml")) and not set(n.split(".")) <= identifiers}


def test_the_design_names_each_thread() -> None:
    found: set[str] = set()
    core = [tree for file, tree in trees().items() if DOCS.parent / "kvxfer" in file.parents]
    for call in (node for tree in core for node in ast.walk(tree)):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in {"NamedThread", "Worker", "CopyPool"}
        ):
            given = [*call.args, *(keyword.value for keyword in call.keywords)]
            found |= {x.value for x in given if isinstance(x, ast.Constant) and str(x.value).startswith("kvxfer-")}
    page = (DOCS / "design.md").read_text()
    assert found and not {name for name in found if f"`{name}`" not in page}
