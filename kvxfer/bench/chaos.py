"""``kvxfer bench chaos``: engines of one and two ranks under kills, stops, preemptions and clients that leave.

Two producers and two consumers, of one rank and of two, exchange transfers in all pairs. Ranks lag behind each other;
producers take blocks back and compute them anew while they are read; engines are killed and started again, or stopped for
seconds. What must hold: every load ends once, in time; what is delivered is one generation, byte by byte, over all
ranks; all blocks come back, and nobody writes to them afterwards.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from contextlib import closing
from typing import Annotated, Any

import typer

from kvxfer.bench.progress import Say, progress, silent
from kvxfer.bench.ranked import LoadResult
from kvxfer.bench.world import RankedWorld
from kvxfer.errors import ConfigError

__all__ = ["chaos", "measure"]

PRODUCERS = {"producer-1": 1, "producer-2": 2}
CONSUMERS = {"consumer-1": 1, "consumer-2": 2}
"""Names, and how many ranks each has."""
BLOCKS = 256
"""Of an engine: so few that what is given back is soon lent again."""
LOAD = 3
"""In each turn, so many transfers begin between each producer and each consumer."""
SAY_S = 10.0


def _begin(world: RankedWorld, rng: random.Random) -> None:
    """Have transfers begin in all pairs."""
    for producer in PRODUCERS:
        for consumer in CONSUMERS:
            for _ in range(LOAD):
                generations = rng.choices((0, 1, 2, 3), (1, 10, 6, 3))[0]
                gone, fetched, cancelled = (rng.random() < share for share in (0.09, 0.95, 0.1))
                world.begin(producer, consumer, generations, gone=gone, fetched=fetched, cancelled=cancelled)


def _harm(world: RankedWorld, rng: random.Random, faults: Counter[str]) -> None:
    """Kill or stop an engine."""
    name = rng.choice([*PRODUCERS, *CONSUMERS])
    if not world.runs(name):
        return
    if rng.random() < 0.4:
        faults["killed"] += 1
        world.kill(name)
        world.start(name)
    else:
        faults["stopped"] += 1
        world.stop(name, rng.uniform(0.05, 4.0))


def measure(
    seconds: float, every: float, seed: int, config: dict[str, Any], device: str = "cpu", say: Say = silent
) -> dict[str, Any]:
    """Run the engines under faults: kills and stops, ``every`` so many seconds on average, from a seed.

    Ranks of producers and of consumers begin at different GPUs, if ``device`` is ``cuda``. ``say`` is told how far it is, every
    ``SAY_S``.

    Returns:
        Outcomes by kind, faults by kind, the latest outcome in seconds past its deadline, and complaints: none if all
        promises held.
    """
    rng, of_faults = random.Random(seed), random.Random(seed + 1)
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    worst_late_s = 0.0

    def hear(_: str, result: LoadResult) -> None:
        nonlocal worst_late_s
        outcomes[result.kind] += 1
        worst_late_s = max(worst_late_s, result.late_s)

    with closing(RankedWorld({**PRODUCERS, **CONSUMERS}, BLOCKS, rng, config, device, hear)) as world:
        begun = time.monotonic()
        until, harm, told = begun + seconds, begun + every, begun
        while (now := time.monotonic()) < until:
            if now >= told:
                told += SAY_S
                said = f"{outcomes['delivered']} delivered, {faults.total()} faults, {len(world.complaints)} complaints"
                say(f"{now - begun:.0f} of {seconds:.0f} s: {said}")
            _begin(world, rng)
            world.turn()
            if now >= harm:
                _harm(world, rng, faults)
                harm = time.monotonic() + of_faults.expovariate(1 / every)
        say("letting everything end")
        world.rest()
        return {
            "seconds": seconds,
            "seed": seed,
            "outcomes": dict(outcomes),
            "faults": dict(faults),
            "worst_late_s": round(worst_late_s, 2),
            "complaints": world.complaints[:20],
        }


def chaos(
    minutes: Annotated[float, typer.Option(help="How long to run.", min=0.1)] = 5.0,
    every: Annotated[float, typer.Option(help="Mean seconds between two kills or stops.", min=0.1)] = 2.0,
    seed: Annotated[int, typer.Option(help="Of everything that is chosen.")] = 0,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    device: Annotated[str, typer.Option(help="Memory of the caches: cpu or cuda.")] = "cpu",
    integrity: Annotated[str, typer.Option(help="off, sample or full.")] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill, stop and preempt engines of one and two ranks; fails if a byte is wrong, a load late, a block lost."""
    if integrity not in ("off", "sample", "full"):
        raise ConfigError(f"--integrity is off, sample or full, not {integrity!r}")
    settings = {"backend": backend, "integrity": integrity, "staging_bytes": 4 << 20}
    found = measure(60 * minutes, every, seed, settings, device, progress())
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"outcomes: {found['outcomes']}")
        typer.echo(f"faults: {found['faults']}; the latest outcome came {found['worst_late_s']} s after its deadline")
        for complaint in found["complaints"]:
            typer.echo(f"wrong: {complaint}")
    if found["complaints"]:
        raise typer.Exit(1)
