"""Put pieces of the examples into the pages that explain them: ``python docs/snippets.py``.

In each page, what follows ``<!-- snippet: PATH -->`` up to the end of the next fenced block is replaced by that file. ``PATH:FIRST:LAST``
takes these lines, and ``PATH:NAME`` those between the comments ``--8<-- [start:NAME]`` and ``--8<-- [end:NAME]``. So a page reads the
same in the repository and on the site.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parent
MARK = re.compile(r"(<!-- snippet: (\S+) -->\n\n)```python\n.*?^```$", re.DOTALL | re.MULTILINE)


def snippet(where: str) -> str:
    """Return a piece of a file."""
    path, *part = where.split(":")
    lines = (DOCS.parent / path).read_text().splitlines()
    if len(part) == 2:
        lines = lines[int(part[0]) - 1 : int(part[1])]
    elif part:
        begin, end = (
            next(i for i, line in enumerate(lines) if f"--8<-- [{what}:{part[0]}]" in line) for what in ("start", "end")
        )
        lines = lines[begin + 1 : end]
    shown = [line for line in lines if "--8<-- [" not in line]
    return textwrap.dedent("\n".join(shown)).strip("\n")


def page(text: str) -> str:
    """Return a page with its snippets as the files have them now."""
    return MARK.sub(lambda found: f"{found[1]}```python\n{snippet(found[2])}\n```", text)


WRITES = dict.fromkeys(DOCS.rglob("*.md"), page)
"""What this program writes: the pages, and how."""


if __name__ == "__main__":
    for file, write in WRITES.items():
        file.write_text(write(file.read_text()))
