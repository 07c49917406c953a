"""``kvxfer bench table``: turns the JSON lines of other benchmarks into Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.errors import ConfigError
from kvxfer.settings import json_object, read_file


def tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return Markdown tables with a column for each key. Consecutive rows with the same keys share a table."""
    out: list[str] = []
    before: list[str] | None = None
    for row in rows:
        keys = list(row)
        if keys != before:
            out += ["", _line(keys), _line(["---"] * len(keys))]
            before = keys
        out.append(_line([_cell(value) for value in row.values()]))
    return "\n".join(out[1:])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return " ".join(text.split()).replace("|", "\\|")


def table(
    files: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Files with one JSON object per line.")
    ],
) -> None:
    """Print the JSON lines of other benchmarks as Markdown tables, with a section for each file."""
    for file in files:
        try:
            lines = enumerate(read_file(file)[0].decode().splitlines(), 1)
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else e
            raise ConfigError(f"cannot read {str(file)!r}: {why}") from None
        rows = [json_object(line, f"{file}, line {number}") for number, line in lines]
        typer.echo(f"## {file.stem}\n\n{tables(rows)}\n")
