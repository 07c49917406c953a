"""``kvxfer bench server-chaos``: real vLLM servers that die, fall silent and come back at random while clients use them.

Prints what happens, and one JSON object at the end. Exits with 1 unless every request ended with the right tokens or an error, and no
server still holds anything of them.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli.demo import demo_settings
from kvxfer.cli.progress import Say, progress
from kvxfer_bench.vllm.load import Stage, staged, under_load
from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.servers import await_ready, ended_by_sigterm

__all__ = ["server_chaos"]

CLIENTS = 3
PREFILLS = 2


class FaultInjector:
    """Kills and pauses a stage's servers at random, and counts the faults."""

    FAULTS = ("kill prefill", "kill prefill", "pause prefill", "pause prefill", "pause decode", "kill decode")

    def __init__(self, stage: Stage, seed: int, say: Say) -> None:
        self._stage, self._say = stage, say
        self._random = random.Random(seed)
        self.injected: Counter[str] = Counter()

    def inject(self) -> None:
        """Inject one fault. Return a few seconds after the server has resumed or its successor answers."""
        name = self._random.choice(self._stage.prefills)
        fault = self._random.choice(self.FAULTS)
        self._say(f"{fault} ({name})" if "prefill" in fault else fault)
        self.injected[fault] += 1
        if fault == "kill prefill":
            self._kill(name)
        elif fault == "kill decode":
            self._kill("decode")
        elif fault == "pause prefill":
            self._pause(name, self._random.uniform(1, 12))  # sometimes longer than peers wait for a sign of life
        else:
            self._pause("decode", self._random.uniform(0.5, 4))
        time.sleep(self._random.uniform(1, 5))

    def _kill(self, name: str) -> None:
        self._stage[name].kill()
        await_ready([self._stage.start(name)], 300)

    def _pause(self, name: str, seconds: float) -> None:
        self._stage[name].pause()
        time.sleep(seconds)
        self._stage[name].resume()


def server_chaos(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to inject faults, in minutes.")] = 2.5,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    config: Annotated[str, typer.Option(help="Further settings of the connector, as a JSON object.")] = "{}",
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    keep_logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
) -> None:
    """Put vLLM servers under load; kill, pause and restart them at random, and fail if a token is wrong or a request hangs.

    Prints one JSON object.
    """
    settings = demo_settings(backend, config)
    say = progress()
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvxfer-chaos-") as folder:
        model, logs = Path(folder) / "model", keep_logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        write_model(model)
        with staged(model, logs, settings, PREFILLS, say) as (stage, expected):
            faults = FaultInjector(stage, seed, say)

            def inject_faults() -> None:
                until = time.monotonic() + 60 * minutes
                while time.monotonic() < until:
                    faults.inject()
                say("no more faults")

            report = under_load(stage, expected, CLIENTS, seed, inject_faults)
    report = {"backend": settings["backend"], "seed": seed, "faults": dict(sorted(faults.injected.items())), **report}
    typer.echo(json.dumps(report, indent=1))
    if report["objections"]:
        raise typer.Exit(1)
