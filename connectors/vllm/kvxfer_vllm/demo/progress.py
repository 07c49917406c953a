"""How a long run tells what it does, and how it ends: with one line of JSON, and an exit status."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import typer

from kvxfer_vllm.demo.servers import ServerError, ended_by_sigterm

__all__ = ["Say", "progress", "reported"]

Say = Callable[[str], None]


def progress() -> Say:
    """Return what prints on the standard error, behind the seconds since now."""
    start = time.monotonic()
    return lambda what: print(f"{time.monotonic() - start:7.1f} s  {what}", file=sys.stderr, flush=True)


def reported(requests: int, run: Callable[[Say], dict[str, Any]]) -> None:
    """Print the report of a run with so many requests, and exit 1 if it has objections or there is none."""
    start, say = time.monotonic(), progress()
    with ended_by_sigterm():
        try:
            report = run(say)
        except (ServerError, OSError) as error:
            say(f"FAILED: {error}")
            report = {"requests": requests, "identical": 0, "failed": requests, "killed": 0, "joined": 0}
            report["objections"] = [str(error).splitlines()[0]]
    report["seconds"] = round(time.monotonic() - start, 1)
    print(json.dumps(report), flush=True)
    raise typer.Exit(int(bool(report["objections"])))
