"""What a link is taken to move in a second, whatever is in flight together on it: never more than it does, and all of it in the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.protocol import pace
from kvxfer.protocol.pace import LinkPace

MIB = float(1 << 20)
CAPACITY = 1000.0  # MiB in a second


@dataclass
class Part:
    began: float
    mib: int
    left: float = 0.0


Discipline = Callable[[list[Part]], list[float]]
"""Which share of the link each of the parts in flight has."""

DISCIPLINES: dict[str, Discipline] = {
    "one after the other": lambda parts: [1.0] + [0.0] * (len(parts) - 1),
    "the last one first": lambda parts: [0.0] * (len(parts) - 1) + [1.0],
    "all alike": lambda parts: [1.0 / len(parts)] * len(parts),
    "by what is left": lambda parts: [part.left / sum(p.left for p in parts) for part in parts],
}


def run(parts: list[Part], shares: Discipline, ended: Callable[[Part, float], None]) -> None:
    """Have a link move parts, in seconds of its own; ``ended`` is told of each, in the order of their ends."""
    waiting, flight, now = sorted(parts, key=lambda part: part.began), list[Part](), 0.0
    while waiting or flight:
        share = shares(flight) if flight else []
        ends = [part.left / (CAPACITY * s) if s else math.inf for part, s in zip(flight, share, strict=True)]
        step = min([*ends, waiting[0].began - now if waiting else math.inf])
        for part, s, end in zip(flight, share, ends, strict=True):
            part.left = 0.0 if end == step else part.left - CAPACITY * s * step
        now += step
        for part in [p for p in flight if p.left <= 1e-9]:
            flight.remove(part)
            ended(part, now)
        while waiting and waiting[0].began <= now:
            flight.append(waiting.pop(0))
            flight[-1].left = flight[-1].mib


@st.composite
def busy(draw: st.DrawFn) -> list[Part]:
    """Parts of many sizes; the gaps between their beginnings are such that the link is idle at times, or busy for long."""
    gap = draw(st.sampled_from([0.0, 0.01, 0.05, 0.5]))
    gaps = draw(st.lists(st.floats(0.0, gap), min_size=1, max_size=80))
    at, parts = 1.0, []
    for each in gaps:
        at += each
        parts.append(Part(at, draw(st.integers(1, 64))))
    return parts


@pytest.mark.parametrize("discipline", DISCIPLINES)
@given(parts=busy())
def test_a_link_never_looks_faster_than_it_is_and_shows_all_when_it_is_idle(discipline: str, parts: list[Part]) -> None:
    link, left, least = LinkPace(), len(parts), 0.0

    def ended(part: Part, now: float) -> None:
        nonlocal left, least
        left -= 1
        link.took(int(part.mib * MIB), now - part.began, now)
        assert link.bytes_per_s <= CAPACITY * MIB * (1 + 1e-6)
        if not left:
            least = link.bytes_per_s

    run(parts, DISCIPLINES[discipline], ended)
    if len(parts) < pace.LONG:  # no spell was cut
        assert least >= CAPACITY * MIB * (1 - 1e-6)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("together", [1, 2, 5])
def test_what_is_never_idle_is_known_within_a_tenth_and_by_what_came_of_late(discipline: str, together: int) -> None:
    """A link that always has so many parts to move, and of these each as long as the others; and half as fast from some time on."""
    link, now = LinkPace(), 5.0

    def keep_busy(capacity: float, parts: int) -> None:
        nonlocal now
        flight = [Part(now, 8, 8.0) for _ in range(together)]
        for _ in range(parts):
            share = DISCIPLINES[discipline](flight)
            step, done = min(
                (p.left / (capacity * s), i) for i, (p, s) in enumerate(zip(flight, share, strict=True)) if s
            )
            for part, s in zip(flight, share, strict=True):
                part.left -= capacity * s * step
            now += step
            part = flight.pop(done)
            link.took(int(part.mib * MIB), now - part.began, now)
            flight.append(Part(now, 8, 8.0))

    for capacity in (CAPACITY, CAPACITY / 2):
        keep_busy(capacity, 40 * pace.LONG * (1 + together))
        assert 0.9 * capacity * MIB <= link.bytes_per_s <= capacity * MIB * (1 + 1e-6)


def test_what_was_short_neither_tells_nor_pushes_out_what_was_long() -> None:
    link = LinkPace()
    assert not link.slow(1e18), "nothing is known"
    link.took(64 << 20, 1.0, 1.0)
    for i in range(100):
        link.took(1000, 0.001, 2.0 + i)
    assert link.bytes_per_s == 64 << 20
    assert link.slow(2 << 20) and not link.slow(1 << 20)
    for i in range(pace.REMEMBERED):
        link.took(32 << 20, 1.0, 200.0 + 2 * i)
    assert link.bytes_per_s == 32 << 20, "what was long ago counts no more"
