"""`kvxfer demo --engine transformers`: a prefill and a decode process on this machine, tokens compared with a plain run."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli.demo import Demo, demo_settings
from kvxfer.errors import KvxferError

__all__ = ["DEMO", "demo"]

ANSWER_S = 180.0


def demo(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV (see `kvxfer doctor`), or auto.")] = "tcp",
    config: Annotated[str, typer.Option(help="Further settings of kvxfer, as a JSON object.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, no table.")] = False,
) -> None:
    """Prefill in one process and decode in another, with tiny models of several kinds; exit 0 if KV moved and every token is right."""
    settings = demo_settings(backend, config)
    progress = Console(stderr=True, highlight=False)
    progress.print(f"Starting two processes: prefill, decode (back end {settings['backend']}); a plain run here")
    try:
        report = _run(settings, progress)
    except _ProcessError as error:
        progress.print(f"FAILED: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report, Console())
    for objection in report["objections"]:
        progress.print(f"FAILED: {objection}", style="red", markup=False, soft_wrap=True)
    if report["objections"]:
        raise typer.Exit(1)


def _lack() -> str | None:
    for name in ("transformers", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"the demo runs {name}, which is not installed: pip install {name}"
    return None


DEMO = Demo(demo, _lack)


class _ProcessError(KvxferError):
    """A process of the demo has died, or does not answer."""


class _Process:
    """A process that answers questions."""

    def __init__(self, role: str, settings: dict[str, Any]) -> None:
        self.role = role
        command = [sys.executable, "-W", "ignore", "-m", "kvxfer_transformers.demo.process", role, json.dumps(settings)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._said: list[str] = []
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._note, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def _note(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._said = [*self._said[-20:], line.rstrip()]

    def hear(self) -> dict[str, Any]:
        """Return its next answer."""
        try:
            line = self._answers.get(timeout=ANSWER_S)
        except queue.Empty:
            raise _ProcessError(f"the {self.role} process has not answered for {ANSWER_S:g} s") from None
        if line is None:
            raise _ProcessError(f"the {self.role} process has died: {'; '.join(self._said[-1:]) or 'it says nothing'}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Ask, and return the answer."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then `hear` says what has become of it
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self.hear()

    def end(self) -> None:
        """Let it end, or end it."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def _running(settings: dict[str, Any]) -> Iterator[tuple[_Process, _Process]]:
    with contextlib.ExitStack() as ends:
        prefill, decode = (_Process(role, settings) for role in ("prefill", "decode"))
        ends.callback(prefill.end)
        ends.callback(decode.end)
        yield prefill, decode


def _run(settings: dict[str, Any], progress: Console) -> dict[str, Any]:
    start = time.monotonic()
    requests = []
    with _running(settings) as (prefill, decode):
        # Imported while the processes do the same.
        from kvxfer_transformers.demo.cases import CASES, OUTPUT_TOKENS
        from kvxfer_transformers.demo.plain import plain_tokens

        prefill.hear(), decode.hear()
        progress.print(f"  both answer after {time.monotonic() - start:.0f} s")
        for name, case in CASES.items():
            tickets = prefill.ask({"case": name})["tickets"]
            got = decode.ask({"case": name, "tickets": tickets})
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
    return {
        "engine": "transformers",
        "backend": settings["backend"],
        "tokens_identical": all(request["tokens_identical"] for request in requests),
        "kv_bytes": sum(request["kv_bytes"] for request in requests),
        "external_kv_tokens": sum(request["external_kv_tokens"] for request in requests),
        "requests": requests,
        "objections": _objections(requests),
        "seconds": time.monotonic() - start,
    }


def _objections(requests: list[dict[str, Any]]) -> list[str]:
    """Why these requests do not show that KV was moved and came out right; empty if they do."""
    found = [
        f"{request['prompt']!r}: output differs from the plain run's"
        for request in requests
        if not request["tokens_identical"]
    ]
    return found + [f"{request['prompt']!r}: no KV was moved" for request in requests if not request["kv_bytes"]]


def _show(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"KV moved from prefill to decode by {report['backend']}", title_justify="left")
    table.add_column("prompt", no_wrap=True)
    for column in ("tokens", "fetched", "KV", "time"):
        table.add_column(column, justify="right")
    table.add_column("output")
    for request in report["requests"]:
        table.add_row(
            request["prompt"],
            str(request["prompt_tokens"]),
            str(request["external_kv_tokens"]),
            f"{request['kv_bytes'] / 1e6:.2f} MB",
            "" if request["transfer_seconds"] is None else f"{request['transfer_seconds'] * 1e3:.1f} ms",
            "identical" if request["tokens_identical"] else "[red]differs[/]",
        )
    console.print(table)
    if not report["objections"]:
        console.print(
            f"All tokens are identical to the plain run's; {report['external_kv_tokens']} prompt tokens "
            f"({report['kv_bytes'] / 1e6:.2f} MB of KV) came from the prefill process."
        )
