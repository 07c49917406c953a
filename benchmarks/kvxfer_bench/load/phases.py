"""What is measured of two engines in a phase, and the table of many phases that took turns.

``calm``: both engines are busy, and nothing is loaded. ``loads``: they are as busy, and loads come. ``alone``: the same loads come to
engines that have nothing else to do.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec

from kvxfer_bench.verdict import estimate

CALM, LOADS, ALONE = PHASES = "calm", "loads", "alone"
STAGES = ("fetched", "began", "asked", "announced", "heard", "arrived", "ended", "seen")
"""The stages of a load whose distances are told: ``kvxfer.engine.trace``."""
_NUMBERS = itertools.count()


class Arrival(NamedTuple):
    """A request, ``at`` seconds after the start."""

    name: str
    at: float
    tokens: int


class OpenLoop(msgspec.Struct):
    """Requests during ``seconds``, ``a_second`` on average, at random times and of random length, whatever becomes of earlier ones."""

    seconds: float
    a_second: float
    tokens: tuple[int, ...]
    seed: int

    def times(self) -> Iterator[Arrival]:
        """Yield them; each call has other times, and other names."""
        rng, at = random.Random(f"{self.seed} {next(_NUMBERS)}"), 0.0
        while self.a_second and (at := at + rng.expovariate(self.a_second)) < self.seconds:
            yield Arrival(f"r{next(_NUMBERS)}", at, rng.choice(self.tokens))


class Side(msgspec.Struct):
    """What one engine did in a phase.

    Attributes:
        seconds: How long it lasted.
        tokens: Tokens that were computed for requests that do not load: of prompts at prefill, of answers at decode.
        cpu: CPU seconds by thread of kvxfer's, and of its calls on the engine's thread if those are known.
        sleeps: How often threads have gone to sleep.
    """

    seconds: float = 0.0
    tokens: float = 0
    cpu: dict[str, float] = {}
    sleeps: dict[str, int] = {}


class Phase(msgspec.Struct):
    """What both engines did in a phase.

    Attributes:
        cached: Seconds to first tokens of cached prompts.
        loaded: Seconds to first tokens of loads, by the tokens of their prompts.
        traces: Of each load: ``tokens``, ``bytes``, and by each stage the microseconds from its arrival.
    """

    prefill: Side
    decode: Side
    cached: list[float] = []
    loaded: dict[int, list[float]] = {}
    traces: list[dict[str, float]] = []

    @property
    def loads(self) -> int:
        return sum(map(len, self.loaded.values()))


Measure = Callable[[str, OpenLoop], Phase]
"""Measures a phase, in which these requests come."""
Rounds = Sequence[Mapping[str, Phase]]


class Row(NamedTuple):
    """A row of the table: a median, and the interval that holds the true one (``kvxfer_bench.verdict``), or None."""

    what: str
    unit: str
    median: float
    interval: list[float] | None
    of: int

    @property
    def words(self) -> str:
        sure = "" if self.interval is None else f" ({self.interval[0]:g} to {self.interval[1]:g})"
        return f"{self.median:g}{sure}{self.unit and ' '}{self.unit}"


def load_rows(rounds: Rounds) -> Iterator[Row]:
    """Yield the rows. First tokens are of all rounds together, because one round has no 99th percentile; so they have no interval."""
    firsts = {"cached": list(chain.from_iterable(r[LOADS].cached for r in rounds))}
    for tokens in sorted({n for r in rounds for n in r[LOADS].loaded}):
        firsts[f"loaded, {tokens} tokens"] = list(chain.from_iterable(r[LOADS].loaded.get(tokens, ()) for r in rounds))
    for name, seconds in firsts.items():
        for place, at in (("median", 0.5), ("p99", 0.99)):
            if seconds:
                found = quantile(seconds, at)
                yield Row(f"first token, {name}, {place}", "ms", round(1e3 * found, 3), None, len(seconds))
                if name != "cached" and firsts["cached"]:
                    over = found / quantile(firsts["cached"], at)
                    yield Row(f"first token, {name}, {place}, to cached", "", round(over, 3), None, len(seconds))
    yield from _rates(rounds)
    for side in ("prefill", "decode"):
        yield from _costs(rounds, side)
    yield from _stages(rounds)


def quantile(values: Sequence[float], at: float) -> float:
    """Return the smallest of the values that is no less than this share of them."""
    return sorted(values)[max(0, math.ceil(at * len(values)) - 1)]


def _rates(rounds: Rounds) -> Iterator[Row]:
    for side, what in (("decode", "decoded"), ("prefill", "prefilled")):

        def rate(phase: Phase, side: str = side) -> float:
            found: Side = getattr(phase, side)
            return found.tokens / found.seconds

        yield from _both(rounds, f"tokens a second {what}", "1/s", rate, CALM, LOADS)

    def under_way(phase: Phase) -> float:
        return sum(t["bytes"] for t in phase.traces) / sum(t["arrived"] - t["announced"] for t in phase.traces)

    if all(r[p].traces for r in rounds for p in (ALONE, LOADS)):
        yield from _both(rounds, "MB a second under way", "MB/s", under_way, ALONE, LOADS)


def _both(rounds: Rounds, what: str, unit: str, of: Callable[[Phase], float], first: str, then: str) -> Iterator[Row]:
    """Yield what two phases have, and the second as a share of the first."""
    for phase in (first, then):
        yield _row(f"{what}, {phase}", unit, [of(r[phase]) for r in rounds])
    yield _row(f"{what}, {then} to {first}", "", [of(r[then]) / of(r[first]) for r in rounds])


def _costs(rounds: Rounds, side: str) -> Iterator[Row]:
    """Yield what each load has cost each thread beyond what the same time costs without loads, and how often the thread slept for it."""
    for what, words, unit, scale in (("cpu", "CPU", "ms", 1e3), ("sleeps", "sleeps", "", 1.0)):

        def each(r: Mapping[str, Phase], names: Iterable[str], what: str = what, scale: float = scale) -> float:
            calm, loads = getattr(r[CALM], side), getattr(r[LOADS], side)
            before, after = (sum(getattr(s, what).get(name, 0.0) for name in names) for s in (calm, loads))
            return float(scale * (after - before * loads.seconds / calm.seconds) / max(1, r[LOADS].loads))

        names = sorted({name for r in rounds for name in getattr(getattr(r[LOADS], side), what)})
        every = {"all threads": names} if names else {}
        for name, some in {**every, **{name: [name] for name in names}}.items():
            yield _row(f"{words} a load, {side}, {name}", unit, [each(r, some) for r in rounds])


def _stages(rounds: Rounds) -> Iterator[Row]:
    """Yield how long after the stage before each stage was reached, by engines without other work and by busy ones.

    Of prompts of several lengths, the shortest count.
    """
    shortest = min((t["tokens"] for r in rounds for p in (ALONE, LOADS) for t in r[p].traces), default=0)
    for phase in (ALONE, LOADS):
        for before, stage in pairwise(STAGES):
            each = [
                [
                    t[stage] - t[before]
                    for t in r[phase].traces
                    if t["tokens"] == shortest and {before, stage} <= t.keys()
                ]
                for r in rounds
            ]
            if all(each):
                yield _row(f"{before} to {stage}, {phase}", "us", [statistics.median(us) for us in each])


def _row(what: str, unit: str, values: Sequence[float]) -> Row:
    found = estimate(values)
    return Row(what, unit, round(found.median, 3), found.interval(3), len(values))
