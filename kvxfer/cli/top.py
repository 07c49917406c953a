"""`kvxfer top`: links, loads, leases, quarantine and failures of running engines, from their Prometheus metrics."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections import defaultdict
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
    before: dict[str, Seen] = {engine: look(engine) for engine in engines} if once else {}
    if once:
        time.sleep(ONCE_S)
    live = None if once or as_json else Live(console=console)
    if live is not None:
        live.start()
    try:
        while True:
            seen = {engine: look(engine) for engine in engines}
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


def look(engine: str) -> Seen:
    """Read an engine's metrics now. An engine that does not answer is an ``error``, no exception."""
    try:
        with urllib.request.urlopen(f"http://{engine}/metrics", timeout=ANSWER_S) as answer:
            page = answer.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as e:
        why = e.reason if type(e) is urllib.error.URLError else str(e).strip() or type(e).__name__
        return Seen(
            engine, time.monotonic(), {}, f"cannot read http://{engine}/metrics: {why}; is this the engine's HTTP port?"
        )
    samples = read_samples(page)
    missing = "" if samples else "its /metrics has no metrics of kvxfer; is kvxfer its connector?"
    return Seen(engine, time.monotonic(), samples, missing)


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
