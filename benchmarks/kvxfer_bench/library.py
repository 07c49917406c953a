"""A back end's library by itself, between the same two processes: the ceiling that ``kvxfer bench transfer`` and ``turns`` show."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import entry_points
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from kvxfer.geometry.plan import Ints
from kvxfer_bench.raw import GROUP, Raw, find
from kvxfer_bench.transfer.engine import BenchEngine
from kvxfer_bench.transfer.meeting import Meeting
from kvxfer_bench.transfer.pair import Pair, span
from kvxfer_bench.transfer.shapes import Request

__all__ = ["ByLibrary", "LibraryPair", "CeilingEngine", "library_figures"]


class CeilingEngine(BenchEngine):
    """An engine of a benchmark that can also move its blocks with its back end's library alone."""

    _raw: Raw | None = None

    def open_raw(self) -> bytes | None:
        """Start the library; return the endpoint for the other side, or ``None`` if the back end declares no library."""
        made = find(self._setup.backend)
        if made is None:
            return None
        self._raw = made(self._setup.role == "producer", self._pool.cache.regions[0], self._setup.options)
        return self._raw.endpoint()

    def connect_raw(self, theirs: bytes) -> bool:
        """Connect the libraries; return whether ``move_raw`` needs both sides."""
        assert self._raw is not None
        self._raw.connect(theirs)
        return self._raw.two_sided

    def move_raw(
        self, src: Ints, dst: Ints, pipe: Connection | None, rounds: int, ways: Sequence[bool]
    ) -> list[list[dict[str, float]]]:
        """Move the blocks with the library; ``pipe`` leads to the other side, if that takes part.

        In each round all ``ways`` take turns: with a message or descriptor for each run (``True``), or all bytes in one.

        Returns:
            For each round and way its start and end, the number of runs, and the seconds of the library's steps by name.
        """
        assert self._raw is not None
        peer = None if pipe is None else Meeting(pipe)
        out: list[list[dict[str, float]]] = []
        for _ in range(rounds):
            out.append([])
            for scattered in ways:
                plan = self._plan(src, dst)
                runs = plan.runs()
                here, there = (runs.src, runs.dst) if self._setup.role == "producer" else (runs.dst, runs.src)
                lengths = runs.length
                if not scattered:
                    here = there = np.zeros(1, np.int64)
                    lengths = np.array([plan.nbytes])
                if peer is not None:
                    peer.meet()
                begun = time.monotonic()
                steps = self._raw.move(here, there, lengths) or {}
                out[-1].append({"begun": begun, "done": time.monotonic(), "runs": len(lengths), **steps})
        return out

    def close(self) -> None:
        """End whatever was opened."""
        super().close()
        if self._raw is not None:
            self._raw.close()


@dataclass(frozen=True)
class ByLibrary:
    """What a request took with the back end's library alone: seconds of each round, and the most messages or descriptors in one.

    ``steps`` holds the seconds of each round for each of the library's own steps, as reported by the side that was last to see them.
    """

    seconds: list[float]
    runs: int
    steps: dict[str, list[float]]

    @classmethod
    def of(cls, rounds: list[list[dict[str, float]]]) -> ByLibrary:
        """Return the figures of some rounds, given what each side has reported of each."""
        last = [sides[-1] for sides in rounds]
        steps = {step: [at[step] for at in last] for step in last[0] if step not in ("begun", "done", "runs")}
        return cls([span(*sides) for sides in rounds], max(int(at["runs"]) for at in last), steps)


class LibraryPair:
    """The back end's library, connected on both sides of a pair of ``CeilingEngine``."""

    def __init__(self, both: Pair) -> None:
        self._both = both
        p, d = both.producer, both.consumer
        theirs, ours = d("open_raw"), p("open_raw")
        p.send("connect_raw", theirs)
        d("connect_raw", ours)
        self._two_sided = bool(p.get())

    def move(self, src: Ints, dst: Ints, ways: Sequence[bool], rounds: int = 1) -> list[ByLibrary]:
        """Move the blocks with the library, in one of ``ways`` after the other; return what each took.

        A way uses a message or descriptor for each run (``True``), or one for all bytes (``False``).
        """
        p, d = self._both.producer, self._both.consumer
        with self._both.pipe() as (one, two):
            if self._two_sided:
                p.send("move_raw", src, dst, one, rounds, ways)
            d.send("move_raw", src, dst, two if self._two_sided else None, rounds, ways)
            sides = self._both.answers() if self._two_sided else (d.get(),)
        return [ByLibrary.of([[side[r][way] for side in sides] for r in range(rounds)]) for way in range(len(ways))]


def library_figures(
    backend: str, start: Callable[..., AbstractContextManager[Pair]], request: Request, repeat: int
) -> dict[str, Any]:
    """Measure the back end's library by itself, in turns with a message or descriptor for each run and with one for all.

    If the library has steps of its own, also return their mean and their 99th percentile, as its own benchmark does.
    """
    if not entry_points(group=GROUP, name=backend):
        return {}
    with start(engine=CeilingEngine) as both:
        ways = LibraryPair(both).move(request.src, request.dst, (False, True), repeat + 2)
        both.expect(request.dst, request.src, "raw library's")
    out: dict[str, Any] = {"raw_runs": ways[1].runs}
    for name, way in zip(("raw_one_message", "raw_runs"), ways, strict=True):
        out[f"{name}_GB_per_s"] = round(request.nbytes / statistics.median(way.seconds[2:]) / 1e9, 3)
        for step, seconds in way.steps.items():
            out[f"{name}_{step}_us"] = round(1e6 * statistics.fmean(seconds[2:]), 1)
            out[f"{name}_{step}_p99_us"] = round(1e6 * float(np.percentile(seconds[2:], 99)), 1)
    return out
