"""Asks each installed back end, in a process of its own, whether it works on this machine.

Libraries that must not share a process (two copies of UCX) therefore never meet, and one that crashes or hangs costs only its line
of the report. These processes are forked from one that has loaded no back end's library, has no threads and nothing open,
but has already imported what all back ends need: new interpreters would each have to import that again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Literal

import msgspec

from kvxfer.backend.ports import Port, listening
from kvxfer.config import Config
from kvxfer.errors import ConfigError, KvxferError
from kvxfer.threads import without_interrupts
from kvxfer.transport import Probe, registry
from kvxfer.transport.auto import AUTO, options_for

PATIENCE_S = 60.0
"""Time for all probes together, which run at the same time. They take a few seconds, most of it for imports."""
GRACE_S = 30.0
"""Time for the process that asks them to start and to end."""


@dataclass(frozen=True)
class Found:
    """What was found out about a back end."""

    probe: Probe  # what its own probe says about this machine
    # the ports that it opened when made with an engine's settings and one link begun, or why it could not be made
    ports: tuple[Port, ...] | str
    # how it moves memory whose pages come and go; empty if it could not be made
    elastic: Literal["", "straight", "staged"] = ""


def probe_all(names: Iterable[str], config: Config | None = None, patience_s: float = PATIENCE_S) -> dict[str, Found]:
    """Probe these back ends, and open each as an engine with this configuration would, in ``patience_s`` seconds for all.

    For a back end that fails nothing is raised: the reason is in its probe.

    Raises:
        KvxferError: The process that asks the back ends does not answer.
    """
    apart = multiprocessing.get_context("spawn")
    ours, theirs = apart.Pipe(duplex=False)
    asking = apart.Process(
        target=_ask, args=(tuple(names), config or Config(), patience_s, theirs), name="kvxfer-probes"
    )
    with without_interrupts():
        asking.start()
    theirs.close()
    try:
        if not ours.poll(patience_s + GRACE_S):
            raise KvxferError("the process that probes the back ends does not answer; is this machine overloaded?")
        found: dict[str, Found] = ours.recv()
        asking.join(GRACE_S)
        return found
    except EOFError:
        asking.join(GRACE_S)
        raise KvxferError(f"the process that probes the back ends died (exit code {asking.exitcode})") from None
    finally:
        ours.close()
        asking.terminate()
        asking.join(GRACE_S)
        asking.kill()
        asking.join()


def _ask(names: Sequence[str], config: Config, patience_s: float, answer: Connection) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # which ends the forks as well
    answer.send(_ask_forks(names, config, patience_s))


def _ask_forks(names: Sequence[str], config: Config, patience_s: float) -> dict[str, Found]:
    apart = multiprocessing.get_context("fork")
    asked: list[tuple[str, BaseProcess, Connection]] = []
    try:
        # Python prints and drops what a signal's handler raises while a process is forked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        for name in names:
            ours, theirs = apart.Pipe(duplex=False)
            asking = apart.Process(target=_probe, args=(name, config, theirs), name=f"kvxfer-probe-{name}")
            asking.start()
            theirs.close()  # so that its end is seen
            asked.append((name, asking, ours))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        due = time.monotonic() + patience_s
        return {name: _answer(process, ours, due) for name, process, ours in asked}
    finally:
        for _, process, ours in asked:
            process.kill()
            process.join()
            ours.close()


def _probe(name: str, config: Config, answer: Connection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.dup2(2, 1)  # what libraries print does not belong in the report
    try:
        probe = registry.probed(registry.load(name))
    except ConfigError as e:
        probe = Probe(False, str(e))
    answer.send((probe.usable, probe.reason, probe.memory, dict(probe.facts)))
    if probe.usable:
        answer.send(_made(name, config))


def _made(name: str, config: Config) -> tuple[tuple[Port, ...] | str, str]:
    """Make a back end; return its ports, and how it moves elastic memory."""
    backend = registry.load(name)
    if config.backend != AUTO and not registry.called(backend, config.backend):
        config = msgspec.structs.replace(config, backend_options={})  # they are another back end's
    before = listening()
    try:
        transport = backend("doctor", options_for(backend, config))
        try:
            transport.endpoint()  # some open a port for each link
            return tuple(sorted(listening() - before)), "straight" if transport.capabilities.elastic else "staged"
        finally:
            transport.close()
    except Exception as e:
        return str(e) or type(e).__name__, ""


def _answer(process: BaseProcess, ours: Connection, due: float) -> Found:
    probe = _probed(process, ours, due)
    if not probe.usable:
        return Found(probe, probe.reason)
    try:
        if ours.poll(max(0.0, due - time.monotonic())):
            return Found(probe, *ours.recv())
    except EOFError:
        pass
    return Found(probe, "opening it ended its process, or took too long")


def _probed(process: BaseProcess, ours: Connection, due: float) -> Probe:
    if not ours.poll(max(0.0, due - time.monotonic())):
        return Probe(False, "its probe did not finish in time; is its library or a device stuck?")
    try:
        return Probe(*ours.recv())
    except EOFError:
        process.join(max(0.0, due - time.monotonic()))
    code = process.exitcode or 0
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return Probe(False, f"its probe killed the process ({how}); its library is broken or does not fit this machine")
