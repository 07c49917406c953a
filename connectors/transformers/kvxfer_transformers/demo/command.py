"""`kvxfer demo --engine transformers`: a prefill and a decode process on this machine, with tokens compared to a plain run's."""

from __future__ import annotations

import contextlib
import importlib.util
import time
from typing import Annotated, Any

import typer
from rich.console import Console

from kvxfer.cli.demo import Demo, demo_settings
from kvxfer.cli.demo_report import finish, report_of, say_failed, show_requests
from kvxfer.cli.terminal import make_console
from kvxfer.errors import KvxferError
from kvxfer.testing.remote import Remote

__all__ = ["DEMO", "demo"]


def demo(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV, or auto; see kvxfer doctor.")] = "tcp",
    config: Annotated[str, typer.Option(help="Further settings of kvxfer, as a JSON object.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Prefill in one process and decode in another, with tiny models of several kinds, and compare the tokens with a plain run's.

    Exits with 0 if KV was moved and every token is right.
    """
    settings = demo_settings(backend, config)
    progress = make_console(stderr=True, highlight=False)
    progress.print(f"Starting a prefill and a decode process (back end {settings['backend']})")
    try:
        report = _run(settings, progress)
    except KvxferError as error:
        say_failed(error)
        raise typer.Exit(1) from None
    finish(report, as_json, _show)


def _lack() -> str | None:
    for name in ("transformers", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"the demo needs {name}, which is not installed: pip install {name}"
    return None


DEMO = Demo(demo, _lack)


def _side(settings: dict[str, Any]) -> Any:
    """Make one side of the demo, in a process of its own."""
    from kvxfer_transformers.demo.process import DemoSide

    return DemoSide(settings)


def _run(settings: dict[str, Any], progress: Console) -> dict[str, Any]:
    start = time.monotonic()
    requests = []
    with contextlib.ExitStack() as ends:
        prefill, decode = (Remote(role, _side, settings) for role in ("prefill", "decode"))
        ends.callback(prefill.close)
        ends.callback(decode.close)
        # Imported while the processes do the same.
        from kvxfer_transformers.demo.cases import CASES, OUTPUT_TOKENS, plain_tokens

        prefill.wait()
        decode.wait()
        progress.print(f"  both ready after {time.monotonic() - start:.0f} s")
        for name, case in CASES.items():
            got = decode("decode", name, prefill("prefill", name))
            requests.append(
                {
                    "prompt": name,
                    "prompt_tokens": sum(case.lengths),
                    "output_tokens": OUTPUT_TOKENS * len(case.lengths),
                    "external_kv_tokens": got["fetched"],
                    "kv_bytes": got["kv_bytes"],
                    "transfer_seconds": got["seconds"],
                    "tokens_identical": got["tokens"] == plain_tokens(case),
                }
            )
    report = report_of(settings["backend"], requests, _objections(requests), time.monotonic() - start)
    return {"engine": "transformers", **report}


def _objections(requests: list[dict[str, Any]]) -> list[str]:
    """Return why these requests do not prove that KV was moved correctly, or nothing if they do."""
    found = [
        f"{request['prompt']!r}: output differs from the plain run's"
        for request in requests
        if not request["tokens_identical"]
    ]
    return found + [f"{request['prompt']!r}: no KV was moved" for request in requests if not request["kv_bytes"]]


def _show(report: dict[str, Any], console: Console) -> None:
    show_requests(report, console, "the plain run", "the prefill process")
