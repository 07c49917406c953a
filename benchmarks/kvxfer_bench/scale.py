"""``kvxfer bench scale``: many loads in flight, many links, and many loads per second on one agent, over loopback.

A load is a single small block, so that nearly all of the time goes to control. CPU time counts the whole process: the agent, the
directory, and the simulated engine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any

import typer

from kvxfer.cli.terminal import progress
from kvxfer.config import Config
from kvxfer.identity import Source
from kvxfer.testing.remote import Remote
from kvxfer_bench.agents import LoadEngine
from kvxfer_bench.options import Backend, Json

QUIET_S = 3.0
"""How long to watch what loads or links cost while nothing happens."""
PATIENCE_S = 100.0
TOGETHER = 50
"""Consumers in one process."""


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


@contextmanager
def _engines(backend: str, consumers: Sequence[int] = (1,)) -> Iterator[tuple[Remote, list[Remote], Source]]:
    """Have a producer, a process for each number of ``consumers``, and the producer's address."""
    config = Config(
        backend=backend, transfer_timeout=PATIENCE_S, lease=PATIENCE_S, peer_timeout=30.0, staging_bytes=1 << 20
    )
    with ExitStack() as stack:
        made = [Remote("producer", LoadEngine, config), *(Remote("consumer", LoadEngine, config, n) for n in consumers)]
        for process in made:
            stack.enter_context(process)
        yield made[0], made[1:], made[0]("source")


@contextmanager
def _met(backend: str) -> Iterator[tuple[Remote, Remote, Source, _Watch]]:
    """Have a producer and a consumer that have made their link, so that it is not measured, and watch both."""
    with _engines(backend) as (p, (c,), source):
        p("offer", 0, 1)
        c("fetch", source, 0, 1)
        c("until", 1, PATIENCE_S)
        yield p, c, source, _Watch(producer=p, consumer=c)


def _in_flight(backend: str, loads: int) -> dict[str, Any]:
    """Have ``loads`` loads wait for one producer, then have it offer them all."""
    with _met(backend) as (p, c, source, start):
        c("fetch", source, 1, loads)
        time.sleep(QUIET_S)
        quiet = _Watch(producer=p, consumer=c)
        time.sleep(QUIET_S)
        waiting = quiet.grown(start.before)
        began = time.monotonic()
        p("offer", 1, loads)
        found = c("until", loads, PATIENCE_S)
        took = time.monotonic() - began
        del found["seconds"]
        rate = round(found["outcomes"].get("delivered", 0) / took)
        return {"loads": loads, "while_they_wait": waiting, "delivered_per_s": rate, **found}


def _linked(backend: str, links: int) -> dict[str, Any]:
    """Have ``links`` consumers connect to one producer, each for one load."""
    sizes = [min(TOGETHER, links - n) for n in range(0, links, TOGETHER)]
    with _engines(backend, sizes) as (p, consumers, source):
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
        return {
            "links": p("links"),
            "asked": links,
            "seconds_to_make_them": round(took, 2),
            "idle": quiet.grown(start.before),
            "outcomes": dict(sum((Counter(each["outcomes"]) for each in found), Counter())),
            "words": {kind: words for each in found for kind, words in each["words"].items()},
        }


def _at_rate(backend: str, rate: float, seconds: float) -> dict[str, Any]:
    """Have one consumer make ``rate`` loads per second from one producer."""
    with _met(backend) as (p, c, source, watch):
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
        ms = sorted(1e3 * s for s in found.pop("seconds")) or [0.0]
        return {
            "asked_per_s": rate,
            "delivered_per_s": round(delivered / max(took, seconds)),
            "ms_median": round(statistics.median(ms), 2),
            "ms_99th": round(ms[int(len(ms) * 0.99)], 2),
            "processes": spent,
            **found,
        }


def scale(
    backend: Backend = "tcp",
    loads: Annotated[int, typer.Option(min=1, help="Loads in flight together.")] = 10_000,
    links: Annotated[int, typer.Option(min=1, help="Consumers linked to one producer.")] = 200,
    rate: Annotated[float, typer.Option(min=1, help="Loads per second.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.5, help="How long to keep up that rate, in seconds.")] = 10.0,
    as_json: Json = False,
) -> None:
    """Put many loads in flight, many links, and many loads per second on one agent, and tell what that costs."""
    say = progress()
    say(f"{loads} loads in flight")
    found: dict[str, Any] = {"backend": backend, "in_flight": [_in_flight(backend, loads)]}
    say(f"{links} links")
    found["links"] = _linked(backend, links)
    say(f"{rate:g} loads per second, for {seconds:g} s")
    found["rate"] = [_at_rate(backend, rate, seconds)]
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, rows in found.items():
        for row in rows if isinstance(rows, list) else [rows]:
            typer.echo(f"{name}: {json.dumps(row)}")
