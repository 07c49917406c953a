"""The page on geometry shows what the code does: pictures and tables are drawn anew and compared."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def pictures() -> Any:
    spec = importlib.util.spec_from_file_location("geometry_pictures", DOCS / "geometry_pictures.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_as_the_plans_are(pictures: Any) -> None:
    for name, draw in pictures.PICTURES.items():
        kept = (DOCS / "images" / f"geometry-{name}.svg").read_text()
        assert kept == str(draw()), "run python docs/geometry_pictures.py"


def test_tables_are_as_the_refusals_are(pictures: Any) -> None:
    page = (DOCS / "geometry.md").read_text()
    assert page == pictures.drawn(page), "run python docs/geometry_pictures.py"


def test_every_picture_is_shown(pictures: Any) -> None:
    shown = re.findall(r"\]\(images/geometry-(\w+)\.svg\)", (DOCS / "geometry.md").read_text())
    assert sorted(shown) == sorted(pictures.PICTURES)
