"""What the pages point to is there, and none was left unfinished."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)#\s]*)(#[^)\s]*)?\)")
PLACES = "kvxfer", "backends", "connectors", "tests", "docs", "benchmarks", "examples", "testing"
PATH = re.compile(rf"`((?:{'|'.join(PLACES)})/[\w./-]+?)`")
MODULE = re.compile(r"`(\w+\.py)`")
MODULES = {path.name for place in PLACES for path in (ROOT / place).rglob("*.py")}
UNFINISHED = re.compile(r"@@|^<{7} |^>{7} |\bTODO\b|\bFIXME\b|\bTBD\b|\bXXX\b", re.M)
PATCH = re.compile(r"^```diff.*?^```$", re.M | re.S)
"""Has marks of its own."""


def anchors(page: Path) -> set[str]:
    """As they are made of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_points_to_what_is_there(page: Path) -> None:
    text = page.read_text()
    assert not UNFINISHED.findall(PATCH.sub("", text))
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), path
    if page.name != "CHANGELOG.md":  # which tells of what has been
        assert not {name for name in MODULE.findall(text) if f'title="{name}"' not in text} - MODULES
    for target, anchor in LINK.findall(text):
        if "://" in target:
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        if anchor and there.suffix == ".md":
            assert anchor[1:] in anchors(there), f"{target}{anchor}"


BRINGS = {"conformance": "./testing", "bench": "./benchmarks", "demo": "./connectors/vllm"}
READMES = [*PAGES, *(page for place in PLACES for page in (ROOT / place).rglob("README.md"))]


@pytest.mark.parametrize("page", dict.fromkeys(READMES), ids=lambda p: str(p.relative_to(ROOT)))
def test_what_is_installed_brings_the_commands_that_follow(page: Path) -> None:
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
        for installed, then in re.findall(r"^pip install (.*)\n((?:(?!pip ).*\n)*)", block, re.M):
            for command in re.findall(r"^kvxfer (\w+)", then, re.M):
                assert ".[cli]" in installed and BRINGS.get(command, "") in installed, command
