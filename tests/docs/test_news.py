"""Each fragment of news is well-formed, and a release makes an entry of CHANGELOG.md out of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
TYPES = [kind["directory"] for kind in SETTINGS["type"]]


def test_each_fragment_is_well_formed() -> None:
    for file in (ROOT / SETTINGS["directory"]).iterdir():
        if file.name != "README.md":
            text = file.read_text().strip()
            assert re.fullmatch(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(TYPES)})\.md", file.name), file
            sentences = re.split(r"(?<=[.!?])\s+", text)
            assert text.endswith(".") and len(sentences) <= 2, f"{file}: one or two sentences"
            assert all(len(sentence.split()) <= 40 for sentence in sentences), file
            assert not re.search(r"^\s*([#*-] |\d+\. )", text, re.M), f"{file}: no heading or list"


def test_a_release_is_made_of_the_fragments(tmp_path: Path) -> None:
    pytest.importorskip("towncrier")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    folder = tmp_path / SETTINGS["directory"]
    folder.mkdir()
    for kind in TYPES:
        (folder / f"7.{kind}.md").write_text(f"What was {kind} is written here.\n")
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", "9.9.9", "--date", "2030-01-01"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    before, after = (ROOT / "CHANGELOG.md").read_text(), (tmp_path / "CHANGELOG.md").read_text()
    entry = after[: after.index("## 0.1.0")]
    assert entry.index("## 9.9.9 (2030-01-01)") < entry.index("What was added is written here. (#7)")
    assert [*re.findall(r"^### (\w+)$", entry, re.M)] == [kind["name"] for kind in SETTINGS["type"]]
    assert after.endswith(before[before.index("## 0.1.0") :])
