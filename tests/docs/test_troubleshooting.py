"""Each text that docs/troubleshooting.md quotes is in the code, and each kind of failure has its section."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from kvxfer.failures import FailureKind
from tests.docs.prose import template
from tests.test_structure import trees

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()


@cache
def said() -> str:
    """All texts of the code, where what is put in at run time is `…`."""
    nodes = (node for tree in trees().values() for node in ast.walk(tree))
    return "\n".join(text.replace("\n", " ") for node in nodes for text in template(node))


def test_what_is_quoted_is_what_the_code_says() -> None:
    quoted = re.findall(r"^\| `(.+?)` \|", PAGE, re.M)
    assert len(quoted) > 300 and not [text for text in quoted if text not in said()]


def test_each_kind_of_failure_has_its_section() -> None:
    sections = re.findall(r"^## (\w+)$", PAGE, re.M)
    assert sections == [kind.value for kind in FailureKind]
