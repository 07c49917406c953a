"""Write the rows of ``docs/troubleshooting.md`` from ``docs/errors.toml``: ``python docs/errors_page.py``.

Readers come to a row by searching for the words of an error, so each row stands alone.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PAGE = Path(__file__).with_name("troubleshooting.md")
ERRORS = tomllib.loads(Path(__file__).with_name("errors.toml").read_text())["error"]
MARKS = re.compile(r"(<!-- errors ([\w ]+) -->\n).*?(<!-- end errors \2 -->)", re.DOTALL)


def rows(section: str) -> str:
    """Return the table of a section, by its name in lower case and without commas."""
    lines = ["| what it says | cause | what to do |", "|---|---|---|"]
    for error in ERRORS:
        if error["section"].lower().replace(",", "") == section:
            lines += [f"| `{text}` | {error['cause']} | {error['do']} |" for text in error["texts"]]
    return "\n".join(lines)


def drawn(page: str) -> str:
    """Return the page with its rows as they are in the data."""
    return MARKS.sub(lambda found: f"{found[1]}\n{rows(found[2])}\n\n{found[3]}", page)


WRITES = {PAGE: drawn}
"""What this program writes: the pages, and how."""


if __name__ == "__main__":
    for file, write in WRITES.items():
        file.write_text(write(file.read_text()))
