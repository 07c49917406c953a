"""``kvxfer bench chaos``: engines of one and two ranks under kills, stops, preemptions and clients that leave.

Two producers and two consumers, each pair with one engine of one rank and one of two, exchange transfers in all combinations. Ranks
lag behind each other; producers take blocks back and compute them again while they are read; engines are killed and restarted, or
stopped for seconds. What must hold: every load ends exactly once and in time; what is delivered belongs to one generation, byte for
byte, on all ranks; all blocks come back, and nobody writes to them afterwards.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from kvxfer.cli.terminal import Say, progress, silent
from kvxfer_bench.options import Backend, Device, Json, Minutes, Seed
from kvxfer_bench.world import LoadResult, RankedWorld, conclude, counted

PRODUCERS = {"producer-1": 1, "producer-2": 2}
CONSUMERS = {"consumer-1": 1, "consumer-2": 2}
"""Names of the engines, and the number of ranks of each."""
BLOCKS = 256
"""Blocks of an engine: few enough that a block that is given back is soon lent again."""
LOAD = 3
"""Transfers that begin in each turn between each producer and each consumer."""
EVERY_S = 2.0
"""Mean time between two kills or stops."""
SAY_S = 10.0


def _begin(world: RankedWorld, rng: random.Random) -> None:
    """Begin transfers between all pairs."""
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
    """Run the engines under faults, which are kills and stops, on average one in each ``every`` seconds.

    If ``device`` is ``cuda``, the ranks of producers and those of consumers start on different GPUs. ``say`` is told the progress
    every ``SAY_S``.

    Returns:
        Outcomes by kind, faults by kind, by how many seconds the latest outcome missed its deadline, and complaints, which are
        empty if all promises held.
    """
    rng, of_faults = random.Random(seed), random.Random(seed + 1)
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    worst_late_s = 0.0

    def hear(_: str, result: LoadResult) -> None:
        nonlocal worst_late_s
        outcomes[result.kind] += 1
        worst_late_s = max(worst_late_s, result.late_s)

    with RankedWorld({**PRODUCERS, **CONSUMERS}, BLOCKS, rng, config, device, hear) as world:
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
        say("waiting until everything has ended")
        world.rest()
        complaints = (
            world.complaints[:20] if outcomes["delivered"] else [*world.complaints[:19], "nothing was delivered"]
        )
        return {
            "seconds": seconds,
            "seed": seed,
            "outcomes": dict(outcomes),
            "faults": dict(faults),
            "worst_late_s": round(worst_late_s, 2),
            "complaints": complaints,
        }


def chaos(
    minutes: Minutes = 5.0, seed: Seed = 0, backend: Backend = "tcp", device: Device = "cpu", as_json: Json = False
) -> None:
    """Kill, stop and preempt engines of one and two ranks, and fail if a byte is wrong, a load is late or a block is lost."""
    found = measure(60 * minutes, EVERY_S, seed, {"backend": backend}, device, progress())
    late = f"no outcome came more than {found['worst_late_s']} s after its deadline"
    text = f"outcomes: {counted(found['outcomes'])}\nfaults: {counted(found['faults'])}; {late}"
    conclude(found, as_json, text)
