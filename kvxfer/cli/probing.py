"""What each installed back end says of this machine, asked in a process of its own: libraries that do not go together
(two copies of UCX) do not meet, and one that crashes or hangs is a line of the report and not its end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kvxfer.errors import ConfigError
from kvxfer.transport import Probe, registry

__all__ = ["PATIENCE_S", "probe_all"]

PATIENCE_S = 60.0
"""For all probes together, which run at the same time. They take a few seconds, for importing mostly."""


def probe_all(names: Iterable[str], patience_s: float = PATIENCE_S) -> dict[str, Probe]:
    """Probe these back ends. Never raises for what becomes of one: that is in its ``reason``."""
    apart = multiprocessing.get_context("spawn")
    asked: list[tuple[str, BaseProcess, Connection]] = []
    try:
        for name in names:
            ours, theirs = apart.Pipe(duplex=False)
            asking = apart.Process(target=_probe, args=(name, theirs), name=f"kvxfer-probe-{name}")
            asking.start()
            theirs.close()  # so that its end is seen
            asked.append((name, asking, ours))
        due = time.monotonic() + patience_s
        return {name: _answer(process, ours, due) for name, process, ours in asked}
    finally:
        for _, process, ours in asked:
            process.kill()
            process.join()
            ours.close()


def _probe(name: str, answer: Connection) -> None:
    os.dup2(2, 1)  # what libraries print is no part of a report
    try:
        probe = registry.load(name).probe()
    except ConfigError as e:
        probe = Probe(False, str(e))
    answer.send((probe.usable, probe.reason, probe.memory, dict(probe.facts)))


def _answer(process: BaseProcess, ours: Connection, due: float) -> Probe:
    if not ours.poll(max(0.0, due - time.monotonic())):
        return Probe(False, "its probe does not come to an end; is its library, or a device, stuck?")
    try:
        return Probe(*ours.recv())
    except EOFError:
        process.join(max(0.0, due - time.monotonic()))
    code = process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Probe(False, f"its probe took its process down ({how}); its library is broken, or does not fit this machine")
