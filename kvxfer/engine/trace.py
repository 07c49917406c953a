"""Write a line of JSON for each load with the time of each stage, to show where the wait for the first token went."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from typing import Literal

from kvxfer.errors import ConfigError
from kvxfer.failures import Failure
from kvxfer.identity import Source, TransferId
from kvxfer.logs import logger
from kvxfer.protocol.values import Stages

__all__ = ["Trace"]

STAGES = [name for name in Stages.__struct_fields__ if name != "moving"]

log = logger("kvxfer.engine")

_Way = Literal["within the step", "beside the steps"]


@dataclass(slots=True)
class _Load:
    transfer: TransferId
    source: Source
    arrived: float
    fetched: float = 0.0
    way: _Way | None = None
    tokens: int = 0


class Trace:
    """The trace of one engine's loads. One thread.

    A line has ``engine``, ``request``, ``transfer``, ``source``, ``way``, ``tokens``, ``failure`` (null if it was delivered), ``at``
    (the Unix time at which the request came), and ``us``: the microseconds from then to each stage that it reached.
    ``fetched``: the scheduler side sent the fetch. ``began`` to ``ended``: see ``Stages``, on the slowest rank; comparable
    with the others only if the workers run on the scheduler's host. ``seen``: the scheduler side knew the outcome.

    Args:
        path: The file that lines are appended to; None writes nothing.
        engine: The engine's name.

    Raises:
        ConfigError: That file cannot be written, or is a folder, pipe or device.
    """

    def __init__(self, path: str | None, engine: str) -> None:
        if path is not None:
            try:
                # A pipe would hold the scheduler up until somebody reads.
                if os.path.exists(path) and not os.path.isfile(path):
                    raise ConfigError(f"kvxfer setting 'trace': {path} is not a file")
                open(path, "a", encoding="utf-8").close()
            except OSError as e:
                raise ConfigError(f"kvxfer setting 'trace': {path} cannot be written: {e.strerror}") from e
        self._path, self._engine = path, engine
        self._loads: dict[str, _Load] = {}

    def arrived(self, request: str, transfer: TransferId, source: Source) -> None:
        """Record that a request has come that is to be loaded."""
        if self._path is not None:
            self._loads.setdefault(request, _Load(transfer, source, time.monotonic()))

    def fetched(self, request: str, way: _Way, tokens: int) -> None:
        """Record that the fetch of so many tokens is sent."""
        load = self._loads.get(request)
        if load is not None:
            load.fetched, load.way, load.tokens = time.monotonic(), way, tokens

    def seen(self, request: str, failure: Failure | str | None, stages: Stages | None) -> None:
        """Record that a load is over, and write its line."""
        load = self._loads.pop(request, None)
        if load is None or self._path is None:
            return
        now = time.monotonic()
        reached = {} if stages is None else {name: getattr(stages, name) for name in STAGES}
        times = {"fetched": load.fetched, **reached, "seen": now}
        record = {
            "engine": self._engine,
            "request": request,
            "transfer": str(load.transfer),
            "source": str(load.source),
            "way": load.way,
            "tokens": load.tokens,
            "failure": None if failure is None else str(failure),
            "at": round(time.time() - (now - load.arrived), 6),
            "us": {stage: round(1e6 * (t - load.arrived)) for stage, t in times.items() if t},
        }
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as e:
            log.warning("trace: no more lines are written to %s: %s", self._path, e)
            self._path, self._loads = None, {}

    def finished(self, request: str) -> None:
        """Record that the request is over, loaded or not."""
        self._loads.pop(request, None)
