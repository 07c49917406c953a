"""What benchmarks print as JSON becomes tables that Markdown reads as such."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from kvxfer.errors import ConfigError
from kvxfer_bench.table import table

PROGRAM = typer.Typer()
PROGRAM.command()(table)


def test_rows_with_the_same_keys_share_a_table(tmp_path: Path) -> None:
    file = tmp_path / "engines.jsonl"
    rows = [{"backend": "a|b", "ms": 1.5}, {"backend": "c", "ms": 2}, {"backend": "d", "error": "two\nlines"}]
    file.write_text("\n".join(map(json.dumps, rows)))
    result = CliRunner().invoke(PROGRAM, [str(file)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "## engines",
        "",
        "| backend | ms |",
        "| --- | --- |",
        "| a\\|b | 1.5 |",
        "| c | 2 |",
        "",
        "| backend | error |",
        "| --- | --- |",
        "| d | two lines |",
        "",
    ]


def test_what_is_no_json_is_told_by_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "engines.jsonl"
    for wrong, why in (("{}\nx", "line 2 is not JSON"), ("[]", "line 1 must be a JSON object")):
        file.write_text(wrong)
        result = CliRunner().invoke(PROGRAM, [str(file)])
        assert result.exit_code != 0 and why in f"{result.output}{result.exception}"


def test_what_is_no_text_is_told(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(b"\x89PNG\xff")
    result = CliRunner().invoke(PROGRAM, [str(file)])
    assert isinstance(result.exception, ConfigError) and str(result.exception).startswith(f"{file} is no text")
