"""Count the words of README and docs that people have written: ``python docs/words.py``. At most MOST, which a test holds.

Not counted: pages and parts that a program writes (the command line, rows of troubleshooting, tables of states and models, snippets).
"""

from __future__ import annotations

import re
from pathlib import Path

MOST = 50_000
DOCS = Path(__file__).parent
GENERATED = {"reference/cli.md"}
PARTS = re.compile(
    r"<!-- ([\w -]+) -->.*?<!-- end \1 -->|<!-- snippet: \S+ -->\n\n```.*?^```$", re.DOTALL | re.MULTILINE
)


def by_hand(page: Path) -> int:
    """Return how many words of a page are prose or tables by hand."""
    return len(PARTS.sub("", page.read_text()).split())


def pages() -> list[Path]:
    """Return README and every page that is not generated as a whole."""
    found = (page for page in DOCS.rglob("*.md") if str(page.relative_to(DOCS)) not in GENERATED)
    return [DOCS.parent / "README.md", *sorted(found)]


if __name__ == "__main__":
    counts = sorted((by_hand(page), str(page.relative_to(DOCS.parent))) for page in pages())
    for count, name in counts:
        print(f"{count:7,} {name}")
    print(f"{sum(count for count, _ in counts):7,} of {MOST:,} at most")
