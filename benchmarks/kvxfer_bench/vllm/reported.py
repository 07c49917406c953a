"""Ends a run against real servers with one line of JSON and an exit status."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import typer

from kvxfer.cli.progress import Say, progress
from kvxfer_vllm.demo.servers import ServerError, ended_by_sigterm


def reported(requests: int, run: Callable[[Say], dict[str, Any]]) -> None:
    """Print the report of a run with this many requests; exit with 1 if it has objections, or if the run failed."""
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
