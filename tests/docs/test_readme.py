"""What the README says of versions and back ends is so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()


def test_it_names_each_back_end_and_is_short() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.partition("[back ends]")[2].partition("|")[0]))
    assert named - {"auto"} == {path.parent.name for path in ROOT.glob("backends/*/pyproject.toml")}
    assert len(PAGE.splitlines()) <= 90


def test_all_pages_name_one_version_of_transformers() -> None:
    pages = "README.md", "docs/status.md", "docs/transformers.md", "CHANGELOG.md", "examples/transformers/README.md"
    texts = [(ROOT / page).read_text() for page in pages]
    assert [set(re.findall(r"transformers (\d+\.\d+)", text)) for text in texts] == [{"5.19"}] * len(pages)
