"""The README is short, its program runs as it stands there, and what it says of versions and back ends is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= 90


def test_the_program_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_first_command_is_the_example() -> None:
    assert "cd examples/first_transfer && python prefill.py | python decode.py" in PAGE
    assert {"shape.py", "prefill.py", "decode.py"} == {
        file.name for file in (ROOT / "examples" / "first_transfer").glob("*.py")
    }


def test_it_names_each_back_end() -> None:
    named = PAGE.partition("[back ends]")[2].partition("|")[0]
    assert set(re.findall(r"`(\w+)`", named)) - {"auto"} == {
        path.parent.name for path in ROOT.glob("backends/*/pyproject.toml")
    }


def test_all_pages_name_one_version_of_transformers() -> None:
    pages = "README.md", "docs/status.md", "docs/transformers.md", "CHANGELOG.md", "examples/transformers/README.md"
    texts = [(ROOT / page).read_text() for page in pages]
    assert [set(re.findall(r"transformers (\d+\.\d+)", text)) for text in texts] == [{"5.19"}] * len(pages)


def test_the_state_leads_to_the_rest() -> None:
    assert "docs/status.md" in PAGE.partition("## State")[2]
