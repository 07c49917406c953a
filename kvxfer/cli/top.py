"""`kvxfer top`: links, loads, leases, quarantine and failures of running engines, from their Prometheus metrics."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Column, Table

from kvxfer.cli.terminal import make_console, verbatim
from kvxfer.identity import IdentityError, parse_address
from kvxfer.prometheus import Samples, read_samples

__all__ = ["top"]

ANSWER_S = 5.0
"""Seconds that all engines together have for their answers."""
ONCE_S = 1.0
"""Seconds between the two looks of ``--once``."""
MAX_BYTES = 64 << 20
_NO_FAILURES = ("delivered", "cancelled")


def top(
    engines: Annotated[
        list[str],
        typer.Argument(metavar="HOST:PORT...", help="Addresses of the HTTP servers on which engines serve /metrics."),
    ],
    every: Annotated[float, typer.Option(help="Seconds between two updates.", min=0.1, max=86400)] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Show one update, with the rates of one second, and exit: with 1 if metrics cannot be read."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per update.")] = False,
) -> None:
    """Show links, loads, leases, quarantined memory, rates and failures of running engines.

    Rates and `failing now` are about the time since the last update; `failed` counts since the engine's start.
    It only reads each engine's /metrics, as Prometheus does, so engines need no further port. Exits with 2 if the arguments are
    wrong.
    """
    for engine in engines:
        try:
            parse_address(engine)
        except IdentityError as e:
            raise typer.BadParameter(str(e)) from None
    console = make_console()
    before: dict[str, Seen] = look(engines) if once else {}
    if once:
        time.sleep(ONCE_S)
    live = None if once or as_json else Live(console=console)
    if live is not None:
        live.start()
    try:
        while True:
            seen = look(engines)
            if once:  # one that answers once is shown without rates
                seen |= {engine: was for engine, was in before.items() if seen[engine].error and not was.error}
            rows = [row(seen[engine], before.get(engine)) for engine in engines]
            before = seen
            if as_json:
                typer.echo(json.dumps({"time": time.time(), "engines": rows}))
            elif live is None:
                console.print(_table(rows))
            else:
                live.update(_table(rows), refresh=True)
            if once:
                raise typer.Exit(int(any("error" in r for r in rows)))
            time.sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
    finally:
        if live is not None:
            live.stop()


@dataclass(frozen=True)
class Seen:
    """An engine's metrics of kvxfer at one moment, or the error that kept them from being read."""

    engine: str
    at: float
    samples: Samples
    error: str = ""

    def total(self, metric: str, **labels: str) -> float:
        """Return the sum of a metric over all series that have these labels."""
        return sum(value for has, value in self.samples.get(metric, ()) if labels.items() <= has.items())

    def by(self, metric: str, *labels: str) -> dict[str, float]:
        """Return the sums of a metric by the values of these labels, without those that are 0."""
        out: dict[str, float] = defaultdict(float)
        for has, value in self.samples.get(metric, ()):
            out["/".join(has.get(label, "?") for label in labels)] += value
        return {key: value for key, value in sorted(out.items()) if value}


class _Reading(threading.Thread):
    """Reads an engine's metrics. A server that sends a little now and then is not waited for."""

    def __init__(self, engine: str) -> None:
        super().__init__(name="kvxfer-top", daemon=True)
        self._engine = engine
        self._connection = http.client.HTTPConnection(engine, timeout=ANSWER_S)
        self._seen: Seen | None = None
        self.start()

    def run(self) -> None:
        try:
            self._connection.request("GET", "/metrics")
            answer = self._connection.getresponse()
            page = answer.read(MAX_BYTES).decode(errors="replace")
            if answer.status != http.HTTPStatus.OK:
                raise http.client.HTTPException(f"it answers {answer.status} {answer.reason}")
        except (
            OSError,
            ValueError,
            AttributeError,
            http.client.HTTPException,
        ) as e:  # one may be that of a closed socket
            self._seen = self._failed(str(e).strip() or type(e).__name__)
            return
        samples = read_samples(page)
        missing = "" if samples else "its /metrics has no metrics of kvxfer; is kvxfer its connector?"
        self._seen = Seen(self._engine, time.monotonic(), samples, missing)

    def _failed(self, why: str) -> Seen:
        what = f"cannot read http://{self._engine}/metrics: {why}; is this the engine's HTTP port?"
        return Seen(self._engine, time.monotonic(), {}, what)

    def end(self, until: float) -> Seen:
        """Return what it has read by this time of ``time.monotonic``, and end it."""
        self.join(max(until - time.monotonic(), 0.0))
        seen = self._seen or self._failed(f"it has not answered within {ANSWER_S:g} s")
        if self.is_alive() and self._connection.sock is not None:
            with suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        return seen


def look(engines: Iterable[str]) -> dict[str, Seen]:
    """Read the metrics of all engines now, at the same time. One that does not answer in time is an ``error``, no exception."""
    until = time.monotonic() + ANSWER_S
    readings = {engine: _Reading(engine) for engine in engines}
    return {engine: reading.end(until) for engine, reading in readings.items()}


def row(now: Seen, before: Seen | None) -> dict[str, Any]:
    """Return what is shown of an engine; rates need an earlier ``Seen``."""
    if now.error:
        return {"engine": now.engine, "error": now.error}
    loads, offers = (now.by(f"kvxfer_{what}_total", "outcome") for what in ("transfers", "offers"))
    out: dict[str, Any] = {
        "engine": now.engine,
        "links": {kind: int(n) for kind, n in now.by("kvxfer_links", "role", "backend").items()},
        "loads_in_hand": int(now.total("kvxfer_loads_in_hand")),
        "offers_in_hand": int(now.total("kvxfer_offers_in_hand")),
        "quarantined_bytes": int(now.total("kvxfer_quarantined_bytes")),
        "loads": {kind: int(n) for kind, n in loads.items()},
        "offers": {kind: int(n) for kind, n in offers.items()},
        "corrupt": int(now.total("kvxfer_corrupt_total")),
        "failed": sum(int(n) for ends in (loads, offers) for kind, n in ends.items() if kind not in _NO_FAILURES),
    }
    if before is not None and not before.error and now.at > before.at:
        took = now.at - before.at
        ended = now.total("kvxfer_transfers_total") - before.total("kvxfer_transfers_total")
        moved = now.total("kvxfer_kv_bytes_total") - before.total("kvxfer_kv_bytes_total")
        out |= {"loads_per_s": round(max(ended, 0) / took, 2), "mb_per_s": round(max(moved, 0) / took / 1e6, 3)}
        out["failing_per_s"] = _failing(now, before, took)
    return out


def _failing(now: Seen, before: Seen, took: float) -> dict[str, float]:
    """Return how many loads and offers a second have failed between two looks: loads by kind and the peer's host, offers by kind."""
    out = {}
    for metric, labels, what in (
        ("kvxfer_failures_total", ("outcome", "peer"), "load"),
        ("kvxfer_offers_total", ("outcome",), "offer"),
        ("kvxfer_not_loaded_total", ("reason",), "not loaded"),
        ("kvxfer_not_offered_total", ("reason",), "not offered"),
    ):
        then = before.by(metric, *labels)
        for kind, total in now.by(metric, *labels).items():
            if kind not in _NO_FAILURES and total > then.get(kind, 0.0):
                out[f"{what} {kind.replace('/', ' from ', 1)}"] = round((total - then.get(kind, 0.0)) / took, 2)
    return out


def _table(rows: list[dict[str, Any]]) -> Group:
    """Return a row for each engine that answers, and below them a line for each of the others."""
    engine = Column("engine", overflow="fold")
    table = Table(engine, "links", "loads", "offers", "quarantine", "loads/s", "MB/s", "failing now", "failed")
    for r in rows:
        if "error" in r:
            continue
        ends = [f"load {k} {n}" for k, n in r["loads"].items() if k not in _NO_FAILURES]
        ends += [f"offer {k} {n}" for k, n in r["offers"].items() if k not in _NO_FAILURES]
        now = r.get("failing_per_s")
        failing = "" if now is None else ", ".join(f"{k} {n}/s" for k, n in now.items()) or "nothing"
        table.add_row(
            verbatim(r["engine"]),
            ", ".join(f"{n} {verbatim(kind)}" for kind, n in r["links"].items()) or "none",
            str(r["loads_in_hand"]),
            str(r["offers_in_hand"]),
            f"{r['quarantined_bytes'] / 1e6:g} MB",
            str(r.get("loads_per_s", "")),
            str(r.get("mb_per_s", "")),
            verbatim(failing),
            verbatim(", ".join(ends)) or "none",
        )
    errors = [verbatim(f"{r['engine']}: {r['error']}") for r in rows if "error" in r]
    return Group(*([table] if table.rows else []), *errors)
