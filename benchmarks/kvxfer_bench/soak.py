"""``kvxfer bench soak``: steady load with aborts and restarts, and a check that nothing grows.

There are four engines of one rank. A producer and a consumer live through the whole run and are watched. Meanwhile another producer,
which the consumer also reads from, and another consumer, which also reads from the producer, are killed and restarted again and again.
Most transfers go well; some are cancelled, revoked, computed again, never fetched or never offered.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from typing import Annotated, Any

import typer

from kvxfer.cli.terminal import Say, progress, silent
from kvxfer.failures import FailureKind
from kvxfer.settings import json_object
from kvxfer_bench.options import Backend, BackendOptions, Device, Json, Minutes
from kvxfer_bench.table import tables
from kvxfer_bench.world import SETTINGS, TURN_S, LoadResult, RankedWorld, conclude, counted

WATCHED = ("producer", "consumer")
MORTAL = ("mortal producer", "mortal consumer")
PAIRS = (WATCHED, ("mortal producer", "consumer"), ("producer", "mortal consumer"))
BLOCKS = 1024
"""Blocks of an engine: enough for all transfers."""
LOAD = 4
"""Transfers that begin in each turn between each two engines that exchange any."""
GOOD: tuple[dict[str, Any], ...] = {}, {"generations": 2}
BAD: tuple[dict[str, Any], ...] = {"cancelled": True}, {"gone": True}, {"fetched": False}, {"generations": 0}
"""What happens to a transfer, as arguments of ``RankedWorld.begin``."""
SHARES = (70, 6, 6, 6, 6, 6)
K = FailureKind
LATE, MAX_LATE = {K.TIMED_OUT, K.NEVER_OFFERED, K.PEER_LOST, K.PEER_UNREACHABLE, K.NO_SUCH_ENGINE}, 0.01
"""Failures that a busy machine may cause, and the share of transfers for which they are tolerated."""
ROWS = 20

ALONE_S = 2.0
"""How long the watched engines have been alone when it is seen what memory of a GPU is in use then."""

DEVICE_MIB = 64.0
"""How much more of it may be in use when they are alone again in the end: CUDA keeps a few for what was open at one time. While others
run, it depends on how many do."""

# How much each other figure may grow from the second fifth of the run to the last, by their medians.
ALLOWED = {"host_MiB": 6.0, "descriptors": 10, "threads": 2, "fetches": 60, "leases": 60, "quarantined_bytes": 0}
"""A link takes up to ten file descriptors and two threads of a library, and there may be one more link at the end; a leak takes some for
every restart."""
FIGURES = "device_MiB", *ALLOWED
NONE_AT_REST = ("fetches", "leases", "quarantined_bytes")


def measure(
    seconds: float,
    restart_s: float,
    backend: str = "tcp",
    options: dict[str, Any] | None = None,
    device: str = "cpu",
    say: Say = silent,
) -> dict[str, Any]:
    """Run the load, killing an engine every ``restart_s``, then let everything end. ``say`` is told the progress ``ROWS`` times.

    None is killed within ``restart_s`` of the end, where all are: no back end is to be torn from its start by that.

    Returns:
        Samples over time, counts, and complaints, which are empty if nothing grew and nothing went wrong.
    """
    rng = random.Random()
    config = {"backend": backend, "backend_options": options or {}}
    outcomes: Counter[str] = Counter()
    late: list[str] = []
    meant_well: set[int] = set()

    def hear(name: str, result: LoadResult) -> None:
        if name == "consumer":
            outcomes[result.kind] += 1
            if result.number in meant_well and result.kind != "delivered":
                said = late if result.kind in LATE else world.complaints
                said.append(f"transfer {result.number} should have been delivered: {result.reason}")

    def sample() -> dict[str, dict[str, float]]:
        return {name: world.vitals(name) for name in WATCHED}

    def look_alone() -> dict[str, dict[str, float]]:
        until = time.monotonic() + ALONE_S
        while time.monotonic() < until:
            world.turn()
        return sample()

    with RankedWorld(dict.fromkeys((*WATCHED, *MORTAL), 1), BLOCKS, rng, config, device, hear) as world:
        begun = time.monotonic()
        rows: list[dict[str, Any]] = []
        alone: dict[str, dict[str, float]] = {}
        next_restart, turn = restart_s, 0
        while (now := time.monotonic() - begun) < seconds:
            for pair in PAIRS:
                for fate in rng.choices((*GOOD, *BAD), SHARES, k=LOAD):
                    number = world.begin(*pair, **fate)
                    if pair == WATCHED and fate in GOOD:
                        meant_well.add(number)
            world.turn()
            if not alone and now >= next_restart and all(map(world.runs, MORTAL)):
                for name in MORTAL:
                    world.kill(name)
                alone = look_alone()
                for name in MORTAL:
                    world.start(name)
                next_restart, turn = time.monotonic() - begun + restart_s, turn + len(MORTAL)
            elif next_restart <= now < seconds - restart_s and world.runs(MORTAL[turn % 2]):
                world.kill(MORTAL[turn % 2])
                world.start(MORTAL[turn % 2])
                next_restart, turn = time.monotonic() - begun + restart_s, turn + 1
            if now >= len(rows) * seconds / ROWS:
                rows.append({"seconds": round(now, 1), **sample()})
                said = f"{outcomes['delivered']} delivered, {turn} restarts, {len(world.complaints)} complaints"
                say(f"{now:.0f} of {seconds:.0f} s: {said}")
        say("waiting until everything has ended")
        for name in MORTAL:
            world.kill(name)
        world.rest()
        over = time.monotonic() + SETTINGS["lease"]
        while sample()["producer"]["leases"] and time.monotonic() < over:
            time.sleep(TURN_S)  # for leases of transfers that were asked for and never offered
        rest = look_alone()
        wrong = world.complaints[:10] + complaints(rows) + left_behind(alone, rest)
        if len(late) > MAX_LATE * outcomes.total() + 1:
            wrong += [f"{len(late)} transfers were too slow", *late[:3]]
        wrong += [f"{n}: {v[k]:g} {k} left at the end" for n, v in rest.items() for k in NONE_AT_REST if v[k]]
        return {
            "backend": backend,
            "seconds": seconds,
            "restarts": turn,
            "outcomes": dict(outcomes),
            "late": len(late),
            "samples": rows,
            "alone": alone,
            "at_rest": rest,
            "complaints": wrong,
        }


def complaints(rows: list[dict[str, Any]]) -> list[str]:
    """Return what grew by more than ``ALLOWED`` from the second fifth of the samples to the last."""
    n = max(len(rows) // 5, 1)
    out = []
    for name in WATCHED:
        for figure in ALLOWED:
            before, after = (statistics.median(r[name][figure] for r in part) for part in (rows[n : 2 * n], rows[-n:]))
            if after - before > ALLOWED[figure]:
                out.append(f"{name}: {figure} grew from {before:g} to {after:g}")
    return out


def left_behind(alone: dict[str, dict[str, float]], rest: dict[str, dict[str, float]]) -> list[str]:
    """Return on which engines more memory of GPUs is in use at rest than when they were ``alone`` (empty: they never were)."""
    out = []
    for name, then in alone.items():
        before, after = then["device_MiB"], rest[name]["device_MiB"]
        if after - before > DEVICE_MIB:
            out.append(
                f"{name}: device_MiB grew from {before:g} to {after:g}, with no other engine running either time"
            )
    return out


def soak(
    minutes: Minutes = 5.0,
    restart: Annotated[float, typer.Option(help="Seconds between two kills.", min=1)] = 10.0,
    backend: Backend = "tcp",
    options: BackendOptions = "{}",
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Run a steady load with aborts and restarts, print what two engines hold over time, and fail if anything grows."""
    chosen = json_object(options, "--options")
    found = measure(60 * minutes, restart, backend, chosen, device, progress())
    conclude(found, as_json, _shown(found))


def _shown(found: dict[str, Any]) -> str:
    alone = [{"seconds": "alone", **found["alone"]}] if found["alone"] else []
    samples = [*alone, *found["samples"], {"seconds": "at rest", **found["at_rest"]}]
    parts = [
        f"{who}\n\n{tables({'seconds': row['seconds']} | {f: row[who][f] for f in FIGURES} for row in samples)}\n"
        for who in WATCHED
    ]
    parts.append(f"{found['restarts']} restarts; outcomes on the consumer: {counted(found['outcomes'])}")
    if not found["complaints"]:
        parts.append("passed: nothing grew, all blocks came back, no byte was wrong")
    return "\n".join(parts)
