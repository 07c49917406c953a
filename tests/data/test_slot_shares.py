"""Who gets a producer's slots and who loses one, beside greedy consumers of many kinds, in simulated time.

All speak from one host. What is measured is the wait of consumers that come new, one after the other, and take each piece at once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from kvxfer.config import SLOTS
from kvxfer.data.slot_queue import SlotQueue
from kvxfer.data.staging import Slot, Staging
from kvxfer.geometry import Region
from kvxfer.identity import TransferId
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.values import PartRef
from kvxfer.testing.clock import PlayedClock

TAKES_S, CONTROL_S, RENEWS_S = 0.002, 0.005, 0.02
"""How long an honest consumer needs for a piece, the control threads of both sides for an attempt, and for
a link."""
ALONE_S = 4 * TAKES_S
FLOOR_S = 0.025
"""So much more than twice the time alone is the noise of a busy machine."""

Takes = Callable[[int], float | None]
"""Tells after how many seconds a consumer takes its nth piece; ``None``: never."""


class Part:
    """A part on its way to a consumer. It has what the queue wants to know of a job."""

    def __init__(
        self,
        world: World,
        link: bytes,
        pieces: int,
        takes: Takes,
        attempt: int,
        again: Any = None,
        after: float = CONTROL_S,
    ) -> None:
        self.ref = PartRef("producer", link, TransferId("own/1/x", 0), attempt, 0)
        self.world, self.left, self.takes, self.again, self.after = world, pieces, takes, again, after
        self.slots: list[Slot] = []
        self.starving, self.error, self.begun = False, None, world.clock.now

    def advance(self) -> None:
        while self.left and self.error is None:
            slot = self.world.staging.take(self.ref.link, "producer")
            self.starving = slot is None
            if slot is None:
                return
            self.left -= 1
            self.slots.append(slot)
            after = self.takes(self.world.pieces[self.ref.link])
            self.world.pieces[self.ref.link] += 1
            if after is not None:
                self.world.clock.after(after, lambda slot=slot: self.taken(slot))
        self.starving = False

    def taken(self, slot: Slot) -> None:
        if slot in self.slots:
            self.slots.remove(slot)
            self.world.staging.give(slot)
            self.world.go_on_with(self)

    def give_up(self) -> None:
        self.error = "given up"
        for slot in self.slots:
            self.world.staging.give(slot)
        self.slots.clear()
        self.starving = False
        self.world.end(self)
        if self.again is not None:
            self.world.clock.after(self.after, self.again)


class World:
    """A producer's staging memory, and consumers on one host."""

    def __init__(self, clock: PlayedClock) -> None:
        self.clock = clock
        memory = np.zeros(SLOTS * 4096, np.uint8)
        self.staging = Staging((Region(memory.ctypes.data, memory.nbytes),), memory.nbytes, "cpu")
        self.queue, self.parts = SlotQueue(self.staging), dict[PartRef, Part]()
        self.pieces: dict[bytes, int] = {}
        self._links, self._number = count(), count()

    def link(self, engine: str, key: str) -> bytes:
        link = next(self._links).to_bytes(4, "big")
        self.staging.usage.know(link, PeerIdentity("127.0.0.1", engine, key))
        self.pieces[link] = 0
        return link

    def hang_up(self, link: bytes) -> None:
        self.staging.usage.forget(link)

    def begin(self, part: Part) -> Part:
        self.parts[part.ref] = part
        self.progress(part)
        return part

    def end(self, part: Part) -> None:
        self.parts.pop(part.ref, None)
        self.queue.remove(part)  # type: ignore[arg-type]

    def progress(self, part: Any) -> None:
        part.advance()
        if not part.left and not part.slots:
            self.end(part)
        elif part.starving:
            self.queue.add(part)
        else:
            self.queue.remove(part)

    def go_on_with(self, part: Any) -> None:
        if self.queue.waits("producer") and part.ref in self.parts:
            self.queue.add(part)
            self.queue.feed(self.progress)
        self.progress(part)

    def run(self, until: Callable[[], bool]) -> None:
        """Have time pass, in turns of the data thread of at most a millisecond."""
        while not until():
            self.clock.turn(0.001)
            self.queue.feed(self.progress)
            assert self.clock.now < 1300, "nobody gets anything any more"
            for part in self.queue.stalled_holders(self.parts.values()):  # type: ignore[arg-type]
                self.clock.after(CONTROL_S, part.give_up)  # type: ignore[attr-defined]

    def pass_s(self, seconds: float) -> None:
        until = self.clock.now + seconds
        self.run(lambda: self.clock.now >= until)

    def greedy(self, name: str, key: str, takes: Takes, renews: bool) -> None:
        """A consumer that asks for many pieces, and again if it is given up; over a new link if it ``renews`` it."""
        attempt, state = count(1), {"link": self.link(name, key), "names": 0}

        def ask() -> None:
            if renews and state["names"]:
                self.hang_up(state["link"])
                state["link"] = self.link(f"{name} {state['names']}", key)
            state["names"] += 1
            self.begin(Part(self, state["link"], 1000, takes, next(attempt), ask, RENEWS_S if renews else CONTROL_S))

        ask()

    def newcomer(self, takes: Takes = lambda n: TAKES_S) -> float:
        """Return how long a load of four pieces takes a consumer that is new."""
        link = self.link(f"newcomer {next(self._number)}", "")
        tries = count(1)
        begun = self.clock.now

        def ask() -> None:
            self.last = self.begin(Part(self, link, 4, takes, next(tries), ask))

        ask()
        self.run(lambda: not self.last.left and not self.last.slots and self.last.error is None)
        self.hang_up(link)
        return self.clock.now - begun


@pytest.fixture
def world() -> Iterator[World]:
    clock = PlayedClock()
    with clock.installed():
        yield World(clock)


def never(n: int) -> float | None:
    return None


def after(pieces: int) -> Takes:
    """Take so many pieces at once and then one never, again and again."""
    return lambda n: None if n % (pieces + 1) == pieces else 0.001


GREEDY: dict[str, tuple[Takes, bool]] = {
    "takes nothing": (never, False),
    "takes nothing, and comes again under another name": (never, True),
    "takes one, and then none": (after(1), False),
    "takes one, then none, and comes again under another name": (after(1), True),
    "takes five, and then none": (after(5), False),
    "takes forty, and then none": (after(40), False),
}


def beside(world: World, kind: str, greedy: int, keys: int, settle: float) -> list[float]:
    """Return how long loads take consumers that come new beside so many greedy ones, which began so many seconds ago."""
    takes, renews = GREEDY[kind]
    for i in range(greedy):
        world.greedy(f"greedy {i}", f"key {i % keys}" if keys > 1 else "", takes, renews)
    world.pass_s(settle)
    took = []
    for _ in range(9):
        took.append(world.newcomer())
        world.pass_s(0.05)
    return took


@pytest.mark.parametrize(
    ("kind", "greedy", "keys", "settle"),
    [
        ("takes nothing", 40, 1, 0.7),
        ("takes nothing", 40, 40, 0.7),
        ("takes nothing", 3, 1, 5.0),
        ("takes nothing", 40, 1, 5.0),
        ("takes nothing", 40, 40, 5.0),
        ("takes nothing", 400, 1, 1.0),
        ("takes nothing, and comes again under another name", 40, 40, 5.0),
        ("takes one, and then none", 40, 1, 5.0),
        ("takes one, then none, and comes again under another name", 40, 40, 5.0),
        ("takes five, and then none", 40, 40, 5.0),
        ("takes forty, and then none", 40, 1, 5.0),
    ],
)
def test_a_newcomer_waits_no_longer_than_it_takes_alone(
    world: World, kind: str, greedy: int, keys: int, settle: float
) -> None:
    took = beside(world, kind, greedy, keys, settle)
    assert statistics.median(took) <= ALONE_S + FLOOR_S, took
    assert max(took) <= 0.3, took


def test_names_without_end_on_one_address_and_key_keep_a_newcomer_waiting_for_a_moment(world: World) -> None:
    """Nothing tells it from them until it takes a piece."""
    assert max(beside(world, "takes nothing, and comes again under another name", 40, 1, 5.0)) < 0.5


def test_a_part_that_holds_two_slots_loses_both_at_once_and_is_told_once(world: World) -> None:
    told: list[Any] = []
    part = world.begin(Part(world, world.link("greedy", ""), 10, never, 1))
    part.give_up = lambda: told.append(part)  # type: ignore[method-assign]
    assert len(part.slots) == 2
    for i in range(3):
        world.begin(Part(world, world.link(f"waits {i}", ""), 1, never, 1))
    world.pass_s(0.6)
    assert told == [part] and world.staging.usage.losses(part.ref.link) == 1


def test_nothing_is_taken_from_consumers_that_take_their_time_while_none_has_stopped(world: World) -> None:
    lost = []
    for i in range(8):
        link = world.link(f"slow {i}", "")
        world.begin(Part(world, link, 20, lambda n: 0.1, 1, lambda: lost.append(True)))
    world.run(lambda: not world.parts)
    assert not lost
