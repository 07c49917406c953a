"""``kvxfer bench soak``: steady load with aborts and restarts, and whether anything grows.

Four engines in processes of their own. A producer and a consumer live through the whole run and are watched; beside
them, a producer that the consumer reads from and a consumer that reads from the producer are killed and started anew
all the time. Most transfers go well; some are cancelled, revoked, computed anew, never fetched or never offered. All
blocks are lent by this process, which takes them back at ``Released`` and so knows of each that does not come back.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.bench.pair import cache_devices
from kvxfer.bench.remote import Remote
from kvxfer.bench.shapes import Model, Pool
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.failures import FailureKind, Outcome
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Ended, Released
from kvxfer.settings import json_object
from kvxfer.values import BlockTable, Fetch, Offer

__all__ = ["complaints", "measure", "soak"]

MODEL = Model(layers=4, heads=2, head_bytes=64, block_tokens=16)
BLOCKS, EACH = 1024, 4
"""Blocks of an engine, and of a transfer."""
STEP_S, LOAD = 0.05, 4
"""Every so often, so many transfers begin between each two engines that exchange any."""
TIMES = {"transfer_timeout": 5.0, "lease": 5.0, "peer_timeout": 2.0}
FATES = {"good": 70, "cancelled": 6, "revoked": 6, "anew": 6, "never fetched": 6, "never offered": 6}
K = FailureKind
LATE, MOST_LATE = {K.TIMED_OUT, K.NEVER_OFFERED, K.PEER_LOST, K.PEER_UNREACHABLE, K.NO_SUCH_ENGINE}, 0.01
"""Failures that a busy machine brings about, and the share of transfers for which they are no complaint."""
ROWS = 20
WATCHED = ("producer", "consumer")

# How much more there may be at the end than after the first fifth: medians of a fifth of the run each.
ALLOWED = {
    "device_MiB": 16.0,
    "rss_MiB": 6.0,
    "descriptors": 10,
    "threads": 1,
    "fetches": 60,
    "leases": 60,
    "quarantined_bytes": 0,
}
"""A link takes up to ten descriptors, and there may be one more at the end; what leaks takes some for every restart."""
FIGURES = tuple(ALLOWED)
NONE_AT_REST = ("fetches", "leases", "quarantined_bytes")


class Engine:
    """One engine of one rank, in its own process."""

    def __init__(self, role: str, backend: str, options: dict[str, Any], device: str) -> None:
        self._pool = Pool(MODEL, BLOCKS, device)
        if role == "producer":
            self._pool.fill()
        settings = {"backend": backend, "backend_options": options, "staging_bytes": 4 << 20, "integrity": "full"}
        config = Config.from_mapping({**settings, **TIMES})
        self._agent = Agent(self._pool.cache, config, role)
        self._directory = Directory(Config(), role, epoch=self._agent.epoch)
        self._directory.publish((self._agent.descriptor,))

    def source(self) -> Source:
        """Return where its directory is."""
        return self._directory.source

    def step(self, calls: list[tuple[Any, ...]]) -> list[tuple[TransferId, Outcome | None]]:
        """Do what the engine is asked for; return the transfers that have ended, with the outcome, or ``None`` for the release."""
        for name, *args in calls:
            getattr(self, f"_{name}")(*args)
        return [
            (e.transfer, e.outcome if isinstance(e, Ended) else None)
            for e in self._agent.events()
            if isinstance(e, Ended | Released)
        ]

    def _offer(self, transfer: TransferId, generation: int, blocks: list[int], final: bool) -> None:
        table = BlockTable.of([blocks])
        self._agent.offer(Offer(transfer, b"d", generation, len(blocks) * MODEL.block_tokens, table, final))

    def _revoke(self, transfer: TransferId, generation: int, gone: bool) -> None:
        self._agent.revoke(transfer, generation, "the engine took the blocks", gone)

    def _fetch(self, transfer: TransferId, source: Source, blocks: list[int]) -> None:
        table, tokens = BlockTable.of([blocks]), len(blocks) * MODEL.block_tokens
        self._agent.fetch(Fetch(str(transfer), transfer, b"d", source, table, 0, tokens))

    def _cancel(self, transfer: TransferId) -> None:
        self._agent.cancel(str(transfer), "the client left")

    def matches(self, mine: list[int], theirs: list[int]) -> bool:
        """Return whether our blocks ``mine`` hold what a producer's blocks ``theirs`` do."""
        return self._pool.matches(np.array(mine), np.array(theirs))

    def vitals(self) -> dict[str, float]:
        """Return the figures that must not grow."""
        with open("/proc/self/statm") as f:
            pages = int(f.read().split()[1])
        stats = self._agent.stats()
        return {
            "device_MiB": _device_mib() if self._pool.device != "cpu" else 0.0,
            "rss_MiB": round(pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20), 2),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "fetches": stats.fetches,
            "leases": stats.offers,
            "quarantined_bytes": stats.quarantined_bytes,
        }

    def close(self) -> None:
        self._agent.close()
        self._directory.close()


def _device_mib() -> float:
    """Return what all processes hold of all GPUs: memory of a peer that has died counts while somebody has it mapped."""
    import torch

    each = (torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count()))
    return round(float(sum(total - free for free, total in each)) / (1 << 20), 2)


@dataclass
class DrivenEngine:
    """An engine as the load drives it: its blocks that are free or lent to a transfer, and what it is asked to do next."""

    remote: Remote
    source: Source
    free: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    lent: dict[TransferId, list[int]] = field(default_factory=dict)
    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def lend(self, transfer: TransferId) -> list[int] | None:
        """Lend blocks in random order; none while too few are free."""
        if len(self.free) < EACH:
            return None
        random.shuffle(self.free)
        self.lent[transfer] = blocks = [self.free.pop() for _ in range(EACH)]
        return blocks


class LoadDriver:
    """Drives the engines.

    ``counts``: what became of the transfers into the consumer that is watched; ``wrong``: what should not have happened; ``late``: what
    should have gone well, and was too slow.
    """

    def __init__(self, make: Any) -> None:
        self._make = make
        self.sides = {name: DrivenEngine(*make(name)) for name in (*WATCHED, "mortal producer", "mortal consumer")}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.late: list[str] = []
        self._numbers = 0
        self._fates: dict[TransferId, str] = {}
        self._sent: dict[TransferId, list[int]] = {}
        self._later: list[tuple[str, tuple[Any, ...]]] = []

    def restart(self, name: str) -> None:
        """Kill an engine and start its successor."""
        self.sides[name].remote.kill()
        self.sides[name] = DrivenEngine(*self._make(name))
        self._later = [(who, call) for who, call in self._later if who != name]

    def begin(self) -> None:
        """Begin some more transfers, between all engines that exchange any."""
        for p, d in (WATCHED, ("mortal producer", "consumer"), ("producer", "mortal consumer")):
            for _ in range(LOAD):
                self._begin(p, d)

    def _begin(self, p: str, d: str) -> None:
        self._numbers += 1
        (fate,) = random.choices(list(FATES), list(FATES.values()))
        transfer = TransferId(f"soak/{p}/{d}", self._numbers)
        offer, fetch = fate != "never offered", fate != "never fetched"
        theirs = self.sides[p].lend(transfer) if offer else None
        mine = self.sides[d].lend(transfer) if fetch else None
        calls: list[tuple[str, tuple[Any, ...]]] = []
        if theirs is not None:
            calls.append((p, ("offer", transfer, 1, theirs, fate != "anew")))
        if mine is not None:
            calls.append((d, ("fetch", transfer, self.sides[p].source, mine)))
            if d == "consumer" and theirs is not None:
                self._sent[transfer] = theirs
            if p in WATCHED and theirs is not None:
                self._fates[transfer] = fate
        random.shuffle(calls)
        for who, call in calls:
            self.sides[who].calls.append(call)
        if fate == "cancelled":
            self._later.append((d, ("cancel", transfer)))
        if fate == "revoked":
            self._later.append((p, ("revoke", transfer, 1, True)))
        if fate == "anew" and theirs is not None:
            self._later += [(p, ("revoke", transfer, 1, False)), (p, ("offer", transfer, 2, theirs, True))]

    def step(self) -> None:
        """Let all engines do what was asked for, and take in what has ended."""
        for side in self.sides.values():
            side.remote.send("step", side.calls)
            side.calls = []
        later, self._later = self._later, []
        for who, call in later:
            self.sides[who].calls.append(call)
        for name, side in self.sides.items():
            for transfer, outcome in side.remote.get():
                if outcome is None:
                    side.free += side.lent.pop(transfer, [])
                elif name == "consumer":
                    self._ended(side, transfer, outcome)

    def _ended(self, side: DrivenEngine, transfer: TransferId, outcome: Outcome) -> None:
        self.counts[str(outcome.kind or "delivered")] += 1
        fate = self._fates.pop(transfer, "")
        if fate in ("good", "anew") and not outcome.delivered:
            if outcome.kind in LATE:
                self.late.append(f"{transfer}: {outcome}")
            else:
                self.wrong.append(f"{transfer} should have gone well: {outcome}")
        sent = self._sent.pop(transfer, None)
        if outcome.delivered and (sent is None or not side.remote("matches", side.lent[transfer], sent)):
            self.wrong.append(f"{transfer} delivered wrong bytes")

    def vitals(self) -> dict[str, dict[str, float]]:
        """Return the figures of the engines that are watched."""
        return {name: self.sides[name].remote("vitals") for name in WATCHED}


def measure(
    seconds: float, restart_s: float, backend: str = "tcp", options: dict[str, Any] | None = None, device: str = "cpu"
) -> dict[str, Any]:
    """Run the load, then let everything end; kill an engine every ``restart_s``.

    Returns:
        Samples over time, counts, and complaints: none if nothing grew and nothing went wrong.
    """
    with _load(backend, options or {}, cache_devices(device)) as load:
        begun = time.monotonic()
        rows: list[dict[str, Any]] = []
        next_restart, turn = restart_s, 0
        while (now := time.monotonic() - begun) < seconds:
            load.begin()
            load.step()
            if now >= next_restart:
                load.restart(("mortal producer", "mortal consumer")[turn % 2])
                next_restart, turn = time.monotonic() - begun + restart_s, turn + 1
            if now >= len(rows) * seconds / ROWS:
                rows.append({"seconds": round(now, 1), **load.vitals()})
            time.sleep(max(0.0, STEP_S - (time.monotonic() - begun - now)))
        for name in ("mortal producer", "mortal consumer"):
            load.sides[name].remote.kill()
            del load.sides[name]
        over = time.monotonic() + 2 * TIMES["transfer_timeout"] + 2 * TIMES["lease"] + TIMES["peer_timeout"]
        rest = load.vitals()
        while time.monotonic() < over and (left(load) or any(v["leases"] for v in rest.values())):
            load.step()
            time.sleep(STEP_S)
            rest = load.vitals()
        wrong = [*load.wrong[:10], *complaints(rows), *left(load)]
        if len(load.late) > MOST_LATE * load.counts.total() + 1:
            wrong += [f"{len(load.late)} transfers were too slow", *load.late[:3]]
        wrong += [f"{n}: {v[k]:g} {k} are left" for n, v in rest.items() for k in NONE_AT_REST if v[k]]
        return {
            "backend": backend,
            "seconds": seconds,
            "restarts": turn,
            "outcomes": dict(load.counts),
            "late": len(load.late),
            "samples": rows,
            "at_rest": rest,
            "complaints": wrong,
        }


@contextmanager
def _load(backend: str, options: dict[str, Any], devices: tuple[str, str]) -> Iterator[LoadDriver]:
    with ExitStack() as stack:
        made: dict[str, Remote] = {}

        def make(name: str) -> tuple[Remote, Source]:
            role = name.removeprefix("mortal ")
            made[name] = Remote(name, Engine, role, backend, options, devices[WATCHED.index(role)])
            return made[name], made[name]("source")

        def close() -> None:
            for remote in made.values():
                remote.close()

        stack.callback(close)
        yield LoadDriver(make)


def left(load: LoadDriver) -> list[str]:
    """Return complaints about blocks that have not come back."""
    return [
        f"{name}: the blocks of {len(side.lent)} transfers did not come back"
        for name, side in load.sides.items()
        if side.lent
    ]


def complaints(rows: list[dict[str, Any]]) -> list[str]:
    """Return what has grown between the second fifth of the samples and the last, by more than ``ALLOWED``."""
    n = max(len(rows) // 5, 1)
    out = []
    for name in WATCHED:
        for figure in FIGURES:
            before, after = (statistics.median(r[name][figure] for r in part) for part in (rows[n : 2 * n], rows[-n:]))
            if after - before > ALLOWED[figure]:
                out.append(f"{name}: {figure} grew from {before:g} to {after:g}")
    return out


def soak(
    minutes: Annotated[float, typer.Option(help="How long to load.", min=0.1)] = 5.0,
    restart: Annotated[float, typer.Option(help="Seconds between two kills.", min=1)] = 10.0,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    options: Annotated[str, typer.Option(help="backend_options as a JSON object.")] = "{}",
    device: Annotated[str, typer.Option(help="Memory of the caches: cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Steady load with aborts and restarts; prints what two engines hold over time. Fails if anything grows."""
    chosen = json_object(options, "--options")
    found = measure(60 * minutes, restart, backend, chosen, device)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _show(found)
    if found["complaints"]:
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for who in WATCHED:
        table = Table("seconds", *(figure.replace("_", " ") for figure in FIGURES), title=who)
        for row in [*found["samples"], {"seconds": "at rest", **found["at_rest"]}]:
            table.add_row(str(row["seconds"]), *(f"{row[who][figure]:g}" for figure in FIGURES))
        console.print(table)
    outcomes = ", ".join(f"{n} {kind}" for kind, n in found["outcomes"].items())
    console.print(f"{found['restarts']} restarts; at the consumer: {outcomes}")
    for complaint in found["complaints"]:
        console.print(f"not flat: {complaint}")
    if not found["complaints"]:
        console.print("flat: nothing grew, all blocks came back, no wrong bytes")
