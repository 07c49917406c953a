"""Write the table of ``docs/router-contract.md`` from the cases of ``kvxfer.testing.router``: ``python docs/router_table.py``.

A test fails when it is not what the code says.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvxfer.testing.router import CASES, RouterCase

PAGE = Path(__file__).with_name("router-contract.md")
MARKS = re.compile(r"(<!-- cases -->\n).*?(<!-- end cases -->)", re.S)


def table() -> str:
    """Return the table of cases."""
    lines = ["| case | what is asked for | KV moves |", "|---|---|---|"]
    lines += [f"| `{case.name}` | {case.what}{_sent(case)} | {case.moves} |" for case in CASES]
    return "\n".join(lines)


def _sent(case: RouterCase) -> str:
    return ", rejected" if case.rejected else ""


def drawn(page: str) -> str:
    """Return the page with the table as the code says."""
    return MARKS.sub(lambda marks: f"{marks[1]}\n{table()}\n\n{marks[2]}", page)


WRITES = {PAGE: drawn}
"""What this program writes: the pages, and how."""


if __name__ == "__main__":
    for file, write in WRITES.items():
        file.write_text(write(file.read_text()))
