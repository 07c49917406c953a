"""``kvxfer bench mixed-load``: mixed load on real vLLM servers whose caches are too small for it.

Clients send prompts that share prefixes; they hang up halfway, and repeat, mix up or withhold the prefill server's parameters. The
caches hold only a few requests, so the engines preempt. Prints a line per minute and one JSON object at the end. Exits with 1
unless every request got the plain server's tokens or a clean error, blocks, threads and descriptors are back where they
were, and memory did not grow in the second half of the time. (In the first half it does, even on a vLLM server without a
connector.)
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli.progress import progress
from kvxfer_bench.vllm.load import staged, under_load
from kvxfer_bench.vllm.resources import resources_of
from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.prompts import PROMPTS
from kvxfer_vllm.demo.servers import ended_by_sigterm


def mixed_load(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long to run, in minutes.")] = 60.0,
    clients: Annotated[int, typer.Option(min=1, help="Number of clients.")] = 8,
    cache_mib: Annotated[
        int, typer.Option(min=4, help="KV cache of each server, in MiB; the longest prompt takes 4.")
    ] = 10,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    seed: Annotated[int, typer.Option(help="Seed of the clients' choices.")] = 0,
) -> None:
    """Load a prefill and a decode server beyond their caches, with clients that hang up, repeat requests and mix up parameters.

    Prints a line per minute and one JSON object at the end. Exits with 1 if a request got wrong tokens or hung, or anything else
    went wrong.
    """
    say = progress()
    # Some share their beginnings, most do not: what hits the prefix cache takes no new blocks.
    prompts = [*PROMPTS.values(), *(f"{n}. {text}" for n in range(8) for text in PROMPTS.values())]
    flags = ["--kv-cache-memory-bytes", str(cache_mib << 20)]
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as folder:
        model, logs = Path(folder) / "model", Path(folder)
        write_model(model)
        with staged(model, logs, {"backend": backend, "lease": 3.0}, 1, say, flags, prompts) as (stage, expected):
            until = time.monotonic() + 60 * minutes

            def meanwhile() -> None:
                while (left := until - time.monotonic()) > 0:
                    time.sleep(min(60, left))
                    preempted = {name: int(total(stage[name], "vllm:num_preemptions_total")) for name in stage.names}
                    resident = {name: resources_of(stage[name].pid).resident >> 20 for name in stage.names}
                    say(f"preemptions {preempted}, resident MiB {resident}, {received(stage['decode'])}")

            report = under_load(stage, expected, clients, seed, meanwhile, warm_up=30 * minutes)
            report["preemptions"] = {
                name: int(total(stage[name], "vllm:num_preemptions_total")) for name in stage.names
            }
    typer.echo(json.dumps(report, indent=1))
    if report["objections"]:
        raise typer.Exit(1)
