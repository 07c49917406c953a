"""Write the tables of ``docs/models.md`` from the catalogue of page kinds: ``python docs/models_table.py``.

A test fails when they are not what the code says.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvxfer_vllm.pages import CATALOGUE, WRITERS
from kvxfer_vllm.pages.families import FAMILIES, Family

PAGE = Path(__file__).with_name("models.md")

KEPT = {
    "full": "all blocks",
    "window": "the window's blocks",
    "chunk": "the chunk's blocks",
    "state": "the last state",
    "ring": "the request's only block",
    "local": "stays local",
    "refused": "refused",
}
FORMS = {
    "kv": "each head's token is its K, then its V",
    "latent": "each token is one row, the same on all ranks",
    "packed": "each head's tokens are one piece",
    "indexer": "all values, then all scales, a row of each for each token; the same on all ranks",
}
SHOWN = {"end to end": "end to end", "scheduler": "on the scheduler", "planner": "planner only"}


def families() -> str:
    """Return the table of models."""
    lines = ["| models | groups | state | shown by | last vLLM | note |", "|---|---|---|---|---|---|"]
    for f in FAMILIES:
        groups = "<br/>".join(dict.fromkeys(what for what, _ in f.groups))
        by = "tests/vllm/test_catalogue.py" if f.refused else f.by
        lines.append(f"| {f.name} | {groups} | {_state(f)} | `{by}` | {f.release} | {f.note} |")
    return "\n".join(lines)


def _state(family: Family) -> str:
    return f"refused ({family.refused})" if family.refused else SHOWN[family.shown]


def kinds() -> str:
    """Return the table of vLLM's cache specs."""
    lines = [
        "| spec | kept | a page | may be cut by | depends on | source | shown by |",
        "|---|---|---|---|---|---|---|",
    ]
    for e in CATALOGUE.values():
        kept = f"{KEPT[e.kept]}: {e.why}" if e.why else KEPT[e.kept]
        lines.append(f"| `{e.spec}` | {kept} | {e.page} | {e.cut} | {e.depends} | {e.source} | `{e.shown}` |")
    return "\n".join(lines)


def writers() -> str:
    """Return the table of attention back ends."""
    lines = ["| attention back end | a page |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name.rpartition('.')[2]}` | {FORMS[form]} |" for name, form in WRITERS.items())])


TABLES = {"families": families, "kinds": kinds, "writers": writers}


def drawn(page: str) -> str:
    """Return the page with its tables as the code has them."""
    for name, table in TABLES.items():
        body = f"<!-- {name} -->\n{table()}\n<!-- end {name} -->"
        page, found = re.subn(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _, b=body: b, page, flags=re.DOTALL)
        if found != 1:
            raise SystemExit(f"{PAGE} has no place for the table {name!r}")
    return page


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
