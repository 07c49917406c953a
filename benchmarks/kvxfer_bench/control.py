"""``kvxfer bench control``: how many transfers the control plane makes, where their time goes, and what authentication costs.

One agent fetches single blocks from another, many at a time, over the default back end, so that nearly all of the time goes to control
and to the back end's fixed costs. This is measured with and without a key, in turns, and the medians of the rounds are compared. For
transfers without a key, the CPU time of each thread on both sides is reported too. Steps: what each step of a transfer costs by itself
(``steps.py``).
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from kvxfer_bench import steps
from kvxfer_bench.agents import LoadEngine
from kvxfer_bench.options import Json

UNDER_WAY = 200
TOGETHER = 25
"""Transfers that are asked for at once; several such batches are under way."""
BLOCK = 4096
PATIENCE_S = 30.0


def transfers(config: Config, seconds: float) -> tuple[float, dict[str, float]]:
    """Fetch transfers of a single block, with ``UNDER_WAY`` of them under way at any time.

    Return the transfers per second, and the microseconds of CPU that each takes on each thread of both sides.

    Raises:
        KvxferError: One was not delivered.
    """
    producer, consumer = Remote("producer", LoadEngine, config, 1, BLOCK), LoadEngine(config, 1, BLOCK)

    def cpu() -> dict[str, float]:
        sides = {"producer": producer("cpu"), "consumer": consumer.cpu()}
        return {f"{side} {thread}": s for side, spent in sides.items() for thread, s in spent.items()}

    try:
        source, begun, before, begin = producer("source"), 0, 0, 0.0
        while not begin or time.perf_counter() - begin < seconds:
            while begun - consumer.released <= UNDER_WAY - TOGETHER:
                producer.send("offer", begun, TOGETHER)
                consumer.fetch(source, begun, TOGETHER)
                producer.get()
                begun += TOGETHER
            consumer.listen(1.0)
            if not begin and consumer.released >= UNDER_WAY:  # links are up
                spent, begin, before = cpu(), time.perf_counter(), consumer.released
        count = consumer.released - before
        rate = count / (time.perf_counter() - begin)
        used = {thread: round((s - spent[thread]) / count * 1e6, 1) for thread, s in cpu().items()}
        for side in (consumer.until(begun, PATIENCE_S), producer("until", begun, PATIENCE_S)):
            if set(side["outcomes"]) != {"delivered"} or side["missing"]:
                raise KvxferError(f"a transfer was not delivered: {side['outcomes']} {side['words']}")
        return rate, used
    finally:
        consumer.close()
        producer.close()


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """Measure with a key and without one, in turns; return the medians and extremes of the rounds."""
    made, microseconds = steps.calls(), steps.microseconds(60)
    rates: dict[str, list[float]] = {"plain": [], "keyed": []}
    cpu: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_key(Path(folder) / "key")
        for _ in range(rounds):
            for kind, key in (("plain", None), ("keyed", str(Path(folder) / "key"))):
                rate, each = transfers(Config(lease=5.0, key_file=key), seconds)
                rates[kind].append(rate)
                cpu += [each] if key is None else []
    median = {k: statistics.median(v) for k, v in rates.items()}
    return {
        "seconds": seconds,
        "rounds": rounds,
        "steps": {step: {"calls": n, "us": microseconds[step]} for step, n in made.items()},
        "transfers": {f"{k}_per_s": round(v) for k, v in median.items()}
        | {f"{k}_least_most": [round(min(v)), round(max(v))] for k, v in rates.items()}
        | {"keyed_to_plain": round(median["keyed"] / median["plain"], 3)},
        "cpu_us": {thread: statistics.median(each[thread] for each in cpu) for thread in sorted(cpu[0])},
    }


def control(
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement, in seconds.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure how many transfers of a single block two processes on this host manage per second, and what the steps of one cost."""
    found = measure(seconds, rounds)
    if as_json:
        typer.echo(json.dumps(found))
        return
    f = found["transfers"]
    typer.echo(
        f"transfers: {f['plain_per_s']}/s without a key ({f['plain_least_most'][0]} to {f['plain_least_most'][1]}), "
        f"{f['keyed_per_s']}/s with a key ({f['keyed_least_most'][0]} to {f['keyed_least_most'][1]}), ratio {f['keyed_to_plain']:.3f}"
    )
    typer.echo("CPU per transfer: " + ", ".join(f"{thread} {us:.0f} us" for thread, us in found["cpu_us"].items()))
    typer.echo(
        "steps of a transfer: "
        + ", ".join(f"{s} {f['calls']:.0f} calls in {f['us']:.1f} us" for s, f in found["steps"].items())
    )
