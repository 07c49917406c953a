"""``kvxfer bench scale``: many loads in flight, many links, and many loads per second on one agent, over loopback.

Each is first measured at the number asked for. Then loads and rate are doubled until something gives way, to see what that is and how
it is reported; or the rate is halved until the agent keeps up. A load is a single small block, so that nearly all of the time goes to
control. CPU time counts the whole process: the agent, the directory, and the simulated engine.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.cli.terminal import Say, progress, silent
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache
from kvxfer.identity import FIRST, Handle, Source, TransferBase, TransferId
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.remote import Remote
from kvxfer.values import BlockTable, Fetch, Offer

BLOCKS, BLOCK = 1 << 16, 256
QUIET_S = 3.0
"""How long to watch what loads or links cost while nothing happens."""
TICK_S = 0.01
PATIENCE_S = 100.0
KEPT_UP = 0.95
"""The share of a rate that must be reached for the agent to count as keeping up."""
MAX_DOUBLINGS = 4
TOGETHER = 50
"""Consumers in one process."""


class ScaleEngine:
    """Engines of one rank each in one process, which share one cache."""

    def __init__(self, backend: str, engines: int = 1) -> None:
        memory = np.zeros((1, BLOCKS, 1, BLOCK), np.uint8)
        cache = Cache.of_tensors(memory, "layer block token unit")
        config = Config(
            backend=backend, transfer_timeout=PATIENCE_S, lease=PATIENCE_S, peer_timeout=30.0, staging_bytes=1 << 20
        )
        self._agents = [Agent(cache, config, f"scale-{i}") for i in range(engines)]
        self._directory = Directory(config, "scale", epoch=self._agents[0].epoch)
        self._directory.publish((self._agents[0].descriptor,))
        self._outcomes: Counter[str] = Counter()
        self._words: dict[str, str] = {}  # the first message for each kind of failure
        self._seconds: list[float] = []
        self._released = 0

    def source(self) -> Source:
        """Return where the first engine's directory is."""
        return self._directory.source

    def offer(self, first: int, count: int) -> None:
        """Offer ``count`` transfers, numbered from ``first`` on."""
        for i in range(first, first + count):
            table = BlockTable.of([[i % BLOCKS]])
            self._agents[0].offer(Offer(TransferId(TransferBase("own/1/scale"), i), b"d", FIRST, 1, table, True))

    def fetch(self, source: Source, first: int, count: int) -> None:
        """Have each engine fetch ``count`` transfers, one after the other."""
        for e, agent in enumerate(self._agents):
            for i in range(first + e * count, first + (e + 1) * count):
                table = BlockTable.of([[i % BLOCKS]])
                agent.fetch(
                    Fetch(Handle(str(i)), TransferId(TransferBase("own/1/scale"), i), b"d", source, table, 0, 1)
                )

    def pace(self, source: Source | None, first: int, rate: float, seconds: float) -> int:
        """Offer (without a source) or fetch ``rate`` transfers per second, as far as that is possible; return how many."""
        begin, done = time.monotonic(), 0
        while (now := time.monotonic()) < begin + seconds:
            due = int((now - begin) * rate) - done
            if due and source is None:
                self.offer(first + done, due)
            elif due and source is not None:
                self.fetch(source, first + done, due)
            done += due
            self._listen()
            time.sleep(TICK_S)
        return done

    def links(self) -> int:
        """Return how many links are up."""
        return sum(link.up for agent in self._agents for link in agent.links())

    def until(self, released: int, seconds: float) -> dict[str, Any]:
        """Wait until this many transfers are released, return how they ended, and forget them."""
        end = time.monotonic() + seconds
        while self._released < released and time.monotonic() < end:
            self._listen()
            time.sleep(TICK_S)
        found = {
            "outcomes": dict(self._outcomes),
            "words": self._words,
            "missing": released - self._released,
            "seconds": self._seconds,
        }
        self._outcomes, self._words, self._seconds, self._released = Counter(), {}, [], 0
        return found

    def _listen(self) -> None:
        for agent in self._agents:
            for event in agent.events():
                if isinstance(event, Ended):
                    kind = str(event.outcome.kind or "delivered")
                    self._outcomes[kind] += 1
                    if event.outcome.failure is not None:
                        self._words.setdefault(kind, event.outcome.failure.detail)
                    self._seconds.append(event.seconds)
                elif isinstance(event, Released):
                    self._released += 1

    def vitals(self) -> dict[str, float]:
        """Return the process's CPU seconds, resident MiB, threads and file descriptors."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return {
            "cpu_s": time.process_time(),
            "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
        }

    def close(self) -> None:
        """End all engines."""
        for agent in self._agents:
            agent.close()
        self._directory.close()


def _engines(backend: str, engines: int = 1) -> ScaleEngine:
    """Make the engines, in a process of their own, without their warnings about each load that is refused."""
    logging.getLogger("kvxfer").setLevel(logging.ERROR)
    return ScaleEngine(backend, engines)


class _Watch:
    """What some processes use between two measurements."""

    def __init__(self, **processes: Remote) -> None:
        self._processes = processes
        self._at, self._then = time.monotonic(), self._look()

    def _look(self) -> dict[str, dict[str, float]]:
        return {name: process("vitals") for name, process in self._processes.items()}

    def grown(self, base: dict[str, dict[str, float]] | None = None) -> dict[str, dict[str, float]]:
        """Return the share of a core that each has used since, and how much it has grown since then or since ``base``."""
        took, now = time.monotonic() - self._at, self._look()
        return {
            name: {
                "core_percent": round(100 * (now[name]["cpu_s"] - self._then[name]["cpu_s"]) / took, 2),
                **{k: round(v - (base or self._then)[name][k], 1) for k, v in now[name].items() if k != "cpu_s"},
            }
            for name in now
        }

    @property
    def before(self) -> dict[str, dict[str, float]]:
        return self._then


def _in_flight(backend: str, loads: int) -> dict[str, Any]:
    """Have ``loads`` loads wait for one producer, then have it offer them all."""
    p, c = Remote("producer", _engines, backend), Remote("consumer", _engines, backend)
    try:
        source = p("source")
        _meet(p, c, source)
        start = _Watch(producer=p, consumer=c)
        c("fetch", source, 1, loads)
        time.sleep(QUIET_S)
        quiet = _Watch(producer=p, consumer=c)
        time.sleep(QUIET_S)
        waiting = quiet.grown(start.before)
        began = time.monotonic()
        p("offer", 1, loads)
        found = c("until", loads, PATIENCE_S)
        took = time.monotonic() - began
        delivered = found["outcomes"].get("delivered", 0)
        return {"loads": loads, "while_they_wait": waiting, "delivered_per_s": round(delivered / took), **_told(found)}
    finally:
        p.close()
        c.close()


def _linked(backend: str, links: int) -> dict[str, Any]:
    """Have ``links`` consumers connect to one producer, each for one load."""
    p = Remote("producer", _engines, backend)
    sizes = [min(TOGETHER, links - n) for n in range(0, links, TOGETHER)]
    consumers = [Remote("consumers", _engines, backend, n) for n in sizes]
    try:
        source = p("source")
        start = _Watch(producer=p)
        p("offer", 0, links)
        began = time.monotonic()
        for i, c in enumerate(consumers):
            c.send("fetch", source, i * TOGETHER, 1)
        for c in consumers:
            c.get()
        found = [c("until", n, PATIENCE_S) for c, n in zip(consumers, sizes, strict=True)]
        took = time.monotonic() - began
        quiet = _Watch(producer=p)
        time.sleep(QUIET_S)
        outcomes: Counter[str] = Counter()
        for each in found:
            outcomes.update(each["outcomes"])
        return {
            "links": p("links"),
            "asked": links,
            "seconds_to_make_them": round(took, 2),
            "idle": quiet.grown(start.before),
            "outcomes": dict(outcomes),
            "words": {kind: words for each in found for kind, words in each["words"].items()},
        }
    finally:
        for process in (*consumers, p):
            process.close()


def _at_rate(backend: str, rate: float, seconds: float) -> dict[str, Any]:
    """Have one consumer make ``rate`` loads per second from one producer."""
    p, c = Remote("producer", _engines, backend), Remote("consumer", _engines, backend)
    try:
        source = p("source")
        _meet(p, c, source)
        watch = _Watch(producer=p, consumer=c)
        began = time.monotonic()
        p.send("pace", None, 1, rate, seconds)
        c.send("pace", source, 1, rate, seconds)
        offered, fetched = p.get(), c.get()
        if fetched > offered:
            p("offer", 1 + offered, fetched - offered)
        found = c("until", fetched, PATIENCE_S)
        took = time.monotonic() - began
        spent = watch.grown()
        delivered = found["outcomes"].get("delivered", 0)
        for each in spent.values():
            each["cpu_ms_per_load"] = round(10 * each["core_percent"] * took / max(delivered, 1), 3)
        ms = sorted(1e3 * s for s in found["seconds"]) or [0.0]
        return {
            "asked_per_s": rate,
            "delivered_per_s": round(delivered / max(took, seconds)),
            "ms_median": round(statistics.median(ms), 2),
            "ms_99th": round(ms[int(len(ms) * 0.99)], 2),
            "processes": spent,
            **_told(found),
        }
    finally:
        p.close()
        c.close()


def _meet(p: Remote, c: Remote, source: Source) -> None:
    """Have them make their link now, so that it is not measured."""
    p("offer", 0, 1)
    c("fetch", source, 0, 1)
    c("until", 1, PATIENCE_S)


def _told(found: dict[str, Any]) -> dict[str, Any]:
    return {"outcomes": found["outcomes"], "words": found["words"], "missing": found["missing"]}


def measure_scale(
    backend: str, loads: int, links: int, rate: float, seconds: float, beyond: bool, say: Say = silent
) -> dict[str, Any]:
    """Measure each of the three, the rate for ``seconds`` seconds. ``say`` is told what is being measured.

    With ``beyond``, double loads and rate until something gives way, or halve the rate until the agent keeps up.
    """

    def in_flight(loads: int) -> dict[str, Any]:
        say(f"{loads} loads in flight")
        return _in_flight(backend, loads)

    def at_rate(rate: float) -> dict[str, Any]:
        say(f"{rate:g} loads per second, for {seconds:g} s")
        return _at_rate(backend, rate, seconds)

    out: dict[str, Any] = {"backend": backend, "in_flight": [in_flight(loads)]}
    say(f"{links} links")
    out["links"] = _linked(backend, links)
    out["rate"] = [at_rate(rate)]
    for _ in range(MAX_DOUBLINGS if beyond else 0):
        last = out["in_flight"][-1]
        if set(last["outcomes"]) == {"delivered"} and not last["missing"]:
            out["in_flight"].append(in_flight(2 * last["loads"]))
        last = out["rate"][-1]
        if _kept_up(last):
            out["rate"].append(at_rate(2 * last["asked_per_s"]))
    while beyond and (last := out["rate"][-1])["asked_per_s"] <= rate and not _kept_up(last):
        out["rate"].append(at_rate(last["asked_per_s"] / 2))
    return out


def _kept_up(found: dict[str, Any]) -> bool:
    return bool(found["delivered_per_s"] >= KEPT_UP * found["asked_per_s"])


def scale(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    loads: Annotated[int, typer.Option(min=1, help="Loads in flight together.")] = 10_000,
    links: Annotated[int, typer.Option(min=1, help="Consumers linked to one producer.")] = 200,
    rate: Annotated[float, typer.Option(min=1, help="Loads per second.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to keep up that rate, in seconds.")] = 10.0,
    beyond: Annotated[
        bool,
        typer.Option(help="Then double loads and rate until something gives way, or halve the rate until it holds."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Put many loads in flight, many links, and many loads per second on one agent, and find out what gives way beyond that."""
    found = measure_scale(backend, loads, links, rate, seconds, beyond, progress())
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, rows in found.items():
        for row in rows if isinstance(rows, list) else [rows]:
            typer.echo(f"{name}: {json.dumps(row)}")
