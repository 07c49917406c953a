"""The program in docs/library.md runs as it stands there, and the snippets are those of the example."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "library.md"
EXAMPLE = PAGE.parents[1] / "examples" / "paged_engine"


def test_the_program_on_the_page_runs() -> None:
    (program,) = re.findall(r"(?<!-->\n\n)```python\n(.*?)```", PAGE.read_text(), re.S)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "moved" in done.stdout


def test_the_snippets_are_whole_and_show_all_that_uses_the_library() -> None:
    """Lines by number move when the example is edited: together they must be just these functions, and each whole statements."""
    shown: dict[str, list[int]] = {"engine.py": [], "worker.py": []}
    for name, first, last in re.findall(
        r"^<!-- snippet: examples/paged_engine/(.*):(\d+):(\d+) -->$", PAGE.read_text(), re.M
    ):
        lines = (EXAMPLE / name).read_text().splitlines()[int(first) - 1 : int(last)]
        ast.parse(textwrap.dedent("\n".join(lines)))
        shown[name] += [n for n, line in enumerate(lines, int(first)) if line.strip()]
    worker, engine = functions("worker.py"), functions("engine.py")
    pinned = [node for node in engine["__init__"].body if "pins" in ast.unparse(node)]
    methods = [engine[name] for name in ("add", "admit", "grow", "drop", "step")]
    assert sorted(shown["worker.py"]) == lines_of(worker["run_worker"].body[1:])
    assert sorted(shown["engine.py"]) == lines_of(pinned + methods)


def functions(name: str) -> dict[str, ast.FunctionDef]:
    nodes = ast.walk(ast.parse((EXAMPLE / name).read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def lines_of(nodes: Sequence[ast.stmt]) -> list[int]:
    return [line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)]
