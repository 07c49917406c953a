"""The program in docs/library.md runs as it stands there, and the snippets are those of the example."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "library.md"


def test_the_program_on_the_page_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "moved" in done.stdout


def test_the_snippets_are_there_and_all_are_shown() -> None:
    shown = re.findall(r'^--8<-- "(.*):(.*)"$', PAGE.read_text(), re.M)
    root = PAGE.parents[1]
    marked = set()
    for path in (root / "examples" / "paged_engine").glob("*.py"):
        text = path.read_text()
        starts, ends = (re.findall(rf"# --8<-- \[{mark}:(\w+)\]", text) for mark in ("start", "end"))
        assert starts == ends
        marked |= {(str(path.relative_to(root)), name) for name in starts}
    assert set(shown) == marked and len(shown) == len(marked)
