"""How a demo reports its requests: one JSON object or a table, what went wrong, and an exit status."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli.terminal import make_console, verbatim
from kvxfer.text import escaped


def report_of(
    backend: str, requests: Sequence[dict[str, Any]], objections: list[str], seconds: float
) -> dict[str, Any]:
    """Return the report of a demo's requests.

    Each request has ``prompt``, ``prompt_tokens``, ``output_tokens``, ``external_kv_tokens``, ``kv_bytes``, ``tokens_identical`` and
    ``transfer_seconds``, which is ``None`` where that is not known.
    """
    return {
        "backend": backend,
        "tokens_identical": all(request["tokens_identical"] for request in requests),
        "kv_bytes": sum(request["kv_bytes"] for request in requests),
        "external_kv_tokens": sum(request["external_kv_tokens"] for request in requests),
        "requests": requests,
        "objections": objections,
        "seconds": seconds,
    }


def show_requests(report: dict[str, Any], console: Console, plain: str, prefill: str) -> None:
    """Print the requests as a table.

    ``plain`` names what computed the expected tokens, and ``prefill`` what computed the KV.
    """
    table = Table(title=f"KV moved from prefill to decode by {verbatim(report['backend'])}", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    timed = all(request["transfer_seconds"] for request in report["requests"])
    for column in ("tokens", "fetched", "KV", "time", *(["GB/s"] if timed else [])):
        table.add_column(column, justify="right")
    table.add_column("output")
    for request in report["requests"]:
        seconds, size = request["transfer_seconds"], request["kv_bytes"]
        table.add_row(
            verbatim(request["prompt"]),
            str(request["prompt_tokens"]),
            str(request["external_kv_tokens"]),
            f"{size / 1e6:.2f} MB",
            "" if seconds is None else f"{seconds * 1e3:.1f} ms",
            *([f"{size / seconds / 1e9:.3f}"] if timed else []),
            "identical" if request["tokens_identical"] else "[red]differs[/]",
        )
    console.print(table)
    if not report["objections"]:
        console.print(
            f"All tokens are identical to {plain}'s; {report['external_kv_tokens']} prompt tokens "
            f"({report['kv_bytes'] / 1e6:.2f} MB of KV) came from {prefill}."
        )


def finish(report: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    """Print a report, and exit 1 if it objects to anything."""
    if as_json:
        typer.echo(json.dumps(report))
    else:
        show(report, make_console())
    for objection in report["objections"]:
        say_failed(objection)
    if report["objections"]:
        raise typer.Exit(1)


def say_failed(why: object) -> None:
    """Print to standard error what failed."""
    lines = "\n".join(map(escaped, str(why).split("\n")))
    make_console(stderr=True).print(f"FAILED: {lines}", style="red", markup=False, soft_wrap=True)
