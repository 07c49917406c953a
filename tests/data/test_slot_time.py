"""Consumers that hold a producer's slots of staging memory, and take what is in them when it suits the test: who gets the next one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from kvxfer.config import SLOTS
from kvxfer.data import slot_queue
from kvxfer.data.commands import Command, Disconnect
from kvxfer.data.staging import CREDITS, RESERVED
from kvxfer.failures import FailureKind
from kvxfer.geometry import ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from kvxfer.testing.clock import SetForward
from kvxfer.testing.engine import PagedMemory
from kvxfer.testing.fake import FakeTransport, Network
from kvxfer.testing.network import LinkEnd
from kvxfer.values import BlockTable
from tests.control.conftest import SeededEngine, fetch, offered, until
from tests.control.stranger import Stranger, hello

STAGED = {"verbs": ["read"], "gathers": False}
CALM = {"staging_bytes": SLOTS * 4096, "peer_timeout": 60.0, "transfer_timeout": 60.0, "lease": 60.0, "blocks": 400}
SLOW = SLOTS - RESERVED
"""Consumers that have a slot each, and all slots that a producer may use."""


def name(i: int | str) -> TransferId:
    return TransferId(f"own/1/{i}", 0)


class Greedy(Stranger):
    """A consumer that asks for 38 pieces of 4 KiB, and takes none of them."""

    def __init__(self, p: SeededEngine, other: FakeTransport, i: int) -> None:
        super().__init__(p.agents[0].descriptor.address, 20.0)
        cache = PagedMemory(blocks=400).caches[0]
        share = ShardAssignment(0, 0, cache.views[0].layers, 0, 4)
        self.say(hello(p, endpoint=other.endpoint(), epoch=i + 1, cache=cache, assignments=(share,)))
        assert isinstance(self.answer(), m.Welcome)
        p.agents[0].offer(offered(list(range(200)), 800, transfer=name(i)))
        self.say(m.FetchRequest(name(i), 1, b"d", 0, 800, BlockTable.of([list(range(200))]), 1, 50.0))


class Slow(Greedy):
    """One that takes them when it is told to."""

    def __init__(self, p: SeededEngine, other: FakeTransport, i: int) -> None:
        super().__init__(p, other, i)
        assert isinstance(self.answer(), m.PartReady)

    def hears(self) -> m.SlotReady:
        """The next piece that is there for it."""
        said = self.answer()
        assert isinstance(said, m.SlotReady), said
        return said

    def takes(self, ready: m.SlotReady) -> None:
        self.say(m.SlotFree(ready.transfer, ready.attempt, ready.part, ready.piece))


Crowd = tuple[SeededEngine, list[Slow], list[m.SlotReady], SeededEngine]


@pytest.fixture
def crowd(clock: SetForward, engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Crowd]:
    """A producer all of whose slots are held, by consumers that have one each, and a consumer in need of one."""
    monkeypatch.setattr(slot_queue, "PATIENCE_S", 1000.0)
    p = engine(dict(STAGED), seed=1, **CALM)
    other = FakeTransport("other", STAGED)
    with ExitStack() as stack:
        stack.callback(other.close)
        slow = [stack.enter_context(Slow(p, other, i)) for i in range(SLOW)]
        first = [slow[0].hears() for _ in range(CREDITS)]  # while it was alone
        for ready in first[:-1]:
            slow[0].takes(ready)
        readies = [first[-1], *(s.hears() for s in slow[1:])]
        d = engine(dict(STAGED), **CALM)
        p.agents[0].offer(offered(list(range(100, 160)), 240, transfer=name("quick")))
        d.agents[0].fetch(fetch(p.source, list(range(60)), 240, transfer=name("quick")))
        data: Any = p.agents[0]._data._first
        until(lambda: bool(data._traffic._awaiting_slot._starved))
        yield p, slow, readies, d


def delivered(p: SeededEngine, d: SeededEngine) -> None:
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    assert all(np.array_equal(d.block(i), p.block(100 + i)) for i in range(60))


def test_the_slot_that_was_held_for_longest_is_given_up_and_no_other(
    clock: SetForward, crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, slow, readies, d = crowd
    monkeypatch.setattr(slot_queue, "PATIENCE_S", 10.0)
    clock.forward(20.0)
    p.agents[0].prepare(d.source)  # which wakes the data thread
    delivered(p, d)
    closed = slow[0].answer()
    assert isinstance(closed, m.AttemptClosed) and closed.kind is FailureKind.OVERLOADED and closed.again
    for s, ready in zip(slow[1:], readies[1:], strict=True):
        s.takes(ready)
        assert s.hears().piece == ready.piece + 1


def test_who_says_that_it_has_everything_keeps_no_slot(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    p, slow, readies, d = crowd
    monkeypatch.setattr(slot_queue, "PATIENCE_S", 0.2)
    slow[0].say(m.Committed(name(0), 1, b"d", 1))
    delivered(p, d)


def test_short_parts_beside_a_long_one_have_every_other_slot(engine: Callable[..., SeededEngine]) -> None:
    """Counted in pieces: a consumer asks for 38, and then for one a time, before it takes any."""
    p = engine(dict(STAGED), seed=1, **CALM)
    other = FakeTransport("other", STAGED)
    with ExitStack() as stack:
        stack.callback(other.close)
        long = stack.enter_context(Slow(p, other, 0))
        held = [long.hears() for _ in range(CREDITS)]  # all that one consumer may have
        shorts = 5
        for i in range(1, 1 + shorts):
            long.say(m.FetchRequest(name(i), 1 + i, b"d", 0, 4, BlockTable.of([[200 + i]]), 1, 50.0))
            p.agents[0].offer(offered([200 + i], 4, transfer=name(i)))
            assert isinstance(long.answer(), m.PartReady)
        order: list[TransferId] = []
        while len(set(order)) < 1 + shorts:
            long.takes(held.pop(0))
            held.append(long.hears())
            order.append(held[-1].transfer)
        assert len(order) <= 2 * shorts, "each waits for the others and for a piece of the long one, not for all of it"
        pieces = {ready.piece for ready in held if ready.transfer == name(0)}
        while 37 not in pieces:
            long.takes(held.pop(0))
            held.append(long.hears())
            pieces.add(held[-1].piece)


def test_a_transfer_of_many_parts_has_no_more_slots_for_that_and_they_go_in_order(
    engine: Callable[..., SeededEngine],
) -> None:
    p = engine(dict(STAGED), seed=1, **CALM)
    other = FakeTransport("other", STAGED)
    with ExitStack() as stack:
        stack.callback(other.close)
        long = stack.enter_context(Slow(p, other, 0))
        held = [long.hears() for _ in range(CREDITS)]
        long.say(m.FetchRequest(name(1), 2, b"d", 0, 480, BlockTable.of([list(range(200, 320))]), 1, 50.0))
        for tokens in (160, 320, 480):
            p.agents[0].offer(
                offered(list(range(200, 200 + tokens // 4)), tokens, final=tokens == 480, transfer=name(1))
            )
            assert isinstance(long.answer(), m.PartReady)
        mine = []
        for _ in range(12):
            long.takes(held.pop(0))
            held.append(long.hears())
            mine += [(held[-1].part, held[-1].piece)] if held[-1].transfer == name(1) else []
        assert 5 <= len(mine) <= 7, "half of the slots, though it has three parts"
        assert mine == sorted(mine)


class Unnoticed(FakeTransport):
    """A back end whose peers go on reading after a link is closed here, as those do for a moment whose bytes a kernel or a card moves."""

    def drop_link(self, number: int, link: LinkEnd) -> None:
        link.other = None
        super().drop_link(number, link)


class Busy:
    """A fence that keeps the control thread, which asks it, until it is told that it has passed."""

    event = None

    def __init__(self) -> None:
        self.asked, self.over = threading.Event(), threading.Event()

    def passed(self) -> bool:
        self.asked.set()
        return self.over.wait(60.0)


Late = tuple[SeededEngine, SeededEngine, Callable[[], None]]


@pytest.fixture
def late(engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """A consumer on the producer's host that has been told of a slot, and reads it when the third says so.

    Others hold all the other slots, and one waits for that slot.
    """
    monkeypatch.setattr(slot_queue, "PATIENCE_S", 1000.0)
    net = Network()
    options = {**STAGED, "network": net}
    backend = f"{__name__}:Unnoticed"
    p, d = (engine({**options, "backend": backend}, seed=seed, **CALM) for seed in (1, None))
    other = FakeTransport("other", options)
    data: Any = p.agents[0]._data._first
    late = d.agents[0]._name
    with ExitStack() as stack:
        stack.callback(other.close)
        net.stop(late)
        p.agents[0].offer(offered(list(range(300, 304)), 16, transfer=name("late")))
        d.agents[0].fetch(fetch(p.source, list(range(4)), 16, transfer=name("late")))
        until(lambda: len(data._traffic._staging.since) == 1)
        assert all(stack.enter_context(Slow(p, other, i)).hears() for i in range(SLOW - 1)), "they hold all the others"
        stack.enter_context(Slow(p, other, SLOW - 1))
        until(lambda: bool(data._traffic._awaiting_slot._starved))
        yield p, d, lambda: net.resume(late)


def test_a_slot_that_is_given_up_is_used_again_only_once_its_reader_can_know(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader looks at the revocation counter, which goes up on the control thread; that has no time here.

    The slot had been packed anew at once, and the reader was delivered what is somebody else's.
    """
    p, d, reads = late
    busy = Busy()
    p.agents[0].offer(offered([399], 4, transfer=name("fenced")), after=busy)
    try:
        assert busy.asked.wait(60.0)
        monkeypatch.setattr(slot_queue, "PATIENCE_S", 0.1)
        time.sleep(0.5)
        reads()
        (end,) = d.wait(Ended)
    finally:
        busy.over.set()
    assert end.outcome.delivered, end
    assert all(np.array_equal(d.block(i), p.block(300 + i)) for i in range(4))


def test_the_slots_of_a_link_that_is_closed_are_used_again_only_once_their_reader_can_know(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control thread has no time as soon as it has told the data thread to close the link."""
    p, d, reads = late
    plane: Any = p.agents[0]._data
    post, closed = plane.post, list[Command]()

    def slowly(command: Command) -> None:
        post(command)
        if isinstance(command, Disconnect) and not closed:
            closed.append(command)
            time.sleep(0.5)
            reads()
            time.sleep(0.5)

    monkeypatch.setattr(plane, "post", slowly)
    p.agents[0].identify({"weights": "others"})
    (end,) = d.wait(Ended)
    assert end.outcome.failure is not None and end.outcome.failure.kind is FailureKind.INCOMPATIBLE, end
