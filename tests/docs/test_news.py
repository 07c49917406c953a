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
NAME = re.compile(rf"(\d+|\+[a-z0-9-]+)\.({'|'.join(TYPES)})\.md")


def faults(name: str, text: str) -> list[str]:
    """Return what is wrong with a fragment."""
    sentences = [s for s in re.split(r"(?<=[.!?])\s+", text.strip()) if s]
    return [
        fault
        for fault, found in {
            f"its name is not ISSUE.TYPE.md or +SLUG.TYPE.md with one of {TYPES}": not NAME.fullmatch(name),
            "it is empty": not sentences,
            "it has more than two sentences": len(sentences) > 2,
            "it does not end with a full stop": not text.rstrip().endswith("."),
            "it has a sentence of more than 40 words": any(len(s.split()) > 40 for s in sentences),
            "it has a heading or a list of its own": bool(re.search(r"^\s*([#*-] |\d+\. )", text, re.M)),
        }.items()
        if found
    ]


def test_each_fragment_is_well_formed() -> None:
    files = [file for file in (ROOT / SETTINGS["directory"]).iterdir() if file.name != "README.md"]
    assert not {file.name: found for file in files if (found := faults(file.name, file.read_text()))}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("12.bugfix.md", "A link is closed."),
        ("fixed.md", "A link is closed."),
        ("12.fixed.txt", "A link is closed."),
        ("12.fixed.md", ""),
        ("12.fixed.md", "A link is closed"),
        ("12.fixed.md", "One. Two. Three."),
        ("12.fixed.md", "- A link is closed."),
        ("12.fixed.md", "word " * 41 + "end."),
    ],
)
def test_a_bad_fragment_is_refused(name: str, text: str) -> None:
    assert faults(name, text)


def test_the_explanation_names_each_type_and_its_examples_are_good() -> None:
    page = (ROOT / SETTINGS["directory"] / "README.md").read_text()
    assert all(f"`{kind}`" in page for kind in TYPES)
    examples = re.findall(r"^news/(\S+)\s+(.*)$", page, re.M)
    assert len(examples) == 2 and not any(faults(name, text) for name, text in examples)


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
    assert not [file for file in folder.iterdir() if file.suffix == ".md"]
