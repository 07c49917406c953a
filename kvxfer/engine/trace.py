"""Tell of each load that is over: in the log if it failed, and in a file of JSON lines where the wait for the first token went."""

from __future__ import annotations

import errno
import json
import os
import stat
import tempfile

from kvxfer.engine.stories import of_load
from kvxfer.errors import ConfigError
from kvxfer.failures import FailureKind
from kvxfer.logs import logger
from kvxfer.schedule import Load
from kvxfer.security import Repeats
from kvxfer.text import printable

log = logger("kvxfer.engine")

_ADVICE = "name a file that the engine may write, in a folder that exists"
LOG_EVERY_S = 10.0
"""Seconds from one log line to the next about loads that failed in the same way, with the same peer."""


class LoadLog:
    """Logs the loads that have failed. One thread."""

    def __init__(self) -> None:
        self._repeats = Repeats(LOG_EVERY_S)

    def read(self, load: Load) -> None:
        """Log a load whose story is closed, if it has failed, unless another was logged for the same reason just now."""
        failure = load.failure
        if failure is None or failure.kind is FailureKind.CANCELLED:
            return
        held = self._repeats.logged((failure.kind, failure.peer))
        if held is not None:
            more = f" ({held} more requests failed so and were not logged)" if held else ""
            log.warning("request %s has not loaded its KV: %s%s", printable(load.request), failure, more)


def check_trace(path: str) -> None:
    """Refuse a trace that cannot be written. Nothing is left there.

    Raises:
        ConfigError: The file cannot be written, or is a folder, pipe or device.
    """
    try:
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
            return
        if not stat.S_ISREG(mode):  # a pipe would hold the scheduler up until a program reads
            raise ConfigError(f"kvxfer setting 'trace': {path} is not a file; {_ADVICE}")
        open(path, "ab").close()
    except OSError as e:
        raise ConfigError(f"kvxfer setting 'trace': {path} cannot be written: {e.strerror}; {_ADVICE}") from e


class Trace:
    """The trace of one engine's loads, of which lines are appended to the file ``path``. One thread.

    A line has ``engine``, ``request``, ``transfer``, ``source``, ``kind``, ``way``, ``tokens``, ``bytes``, ``failure`` (null if it was
    delivered), ``at`` (the Unix time at which the request came), and ``us``: the microseconds from then to each stage that it reached.
    ``kind``: for a load that was asked for (``SchedulerSide.ask``), who has named the source; null for others.

    ``found``: the best answer to the question was known. ``fetched``: the scheduler side sent the fetch. ``began`` to ``ended``: see
    ``Stages``, on the slowest rank; comparable with the others only if the workers run on the scheduler's host. ``seen``: the scheduler
    side knew the outcome.

    Raises:
        ConfigError: See ``check_trace``.
    """

    def __init__(self, path: str, engine: str) -> None:
        check_trace(path)
        open(path, "ab").close()  # so that it can be followed from the start
        self._path, self._engine = path, engine
        self._torn = False  # the last line of the file is not whole
        self._repeats = Repeats(LOG_EVERY_S)

    def read(self, load: Load) -> None:
        """Append the line of a load whose story is closed."""
        story = of_load(load)
        record = {
            "engine": self._engine,
            "request": load.request,
            "transfer": str(load.transfer.name),
            "source": str(load.transfer.source),
            "kind": load.kind,
            "way": "sync" if load.is_sync else "async",
            "tokens": load.end - load.start,
            "bytes": story.came,
            "failure": None if load.failure is None else str(load.failure),
            "at": round(story.at, 6),
            "us": {stage: round(1e6 * after) for stage, after in story.stages.items()},
        }
        self._append(b"\n" * self._torn + json.dumps(record).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        try:
            with open(self._path, "ab", buffering=0) as file:
                written = file.write(line)
                self._torn = 0 < written < len(line) or (self._torn and not written)
                if written < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as e:
            if (held := self._repeats.logged(self._path)) is not None:
                more = f" ({held} more lines were lost)" if held else ""
                log.warning(
                    "trace: no more lines are written to %s: %s; later ones are tried again%s",
                    self._path,
                    e.strerror,
                    more,
                )
