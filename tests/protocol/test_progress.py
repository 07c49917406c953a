"""What a transfer that fails says of how far it had got."""

from __future__ import annotations

from kvxfer.failures import FailureKind
from kvxfer.protocol import messages as m
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.values import LinkInfo, Mode, Move, Moved, Moving, Send
from kvxfer.text import size
from kvxfer.values import Offer
from tests.protocol.test_deadlines import START, TIMEOUT, Asker
from tests.protocol.test_doors import PLANNER, RIGHT, TABLE, T


def test_what_comes_slowly_says_how_much_and_how_fast_and_what_to_set() -> None:
    asker = Asker(4)
    move = asker.hear(10.0, final=True)
    half = move.plan.nbytes // 2
    asker.machine.moving(Moving(((move.ref, half),)), 17.5)
    ended = asker.end(100.0)[1]
    failure, stages = ended.outcome.failure, ended.stages
    assert failure.kind is FailureKind.TIMED_OUT
    assert (
        f"; {size(half)} of {size(2 * half)} had come in 8.0 s, {size(half / TIMEOUT)}/s, and more was coming"
        in failure.detail
    )
    assert "at that rate it takes 16 s" in failure.advice and "'transfer_timeout'" in failure.advice
    assert (ended.nbytes, stages.came, stages.announced_bytes, stages.last) == (half, half, 2 * half, 17.5)


def test_what_has_stopped_says_since_when() -> None:
    asker = Asker()
    first, second = asker.hear(10.0), asker.hear(10.0, part=1)
    asker.machine.moved(Moved(first.ref, None, True, first.plan.nbytes), 11.0)
    failure = asker.end(100.0)[1].outcome.failure
    come, both = first.plan.nbytes, first.plan.nbytes + second.plan.nbytes
    assert f"{size(come)} of {size(both)} announced so far had come in 8.0 s" in failure.detail
    assert "nothing for 7.0 s" in failure.detail and "slow, or stands still" in failure.advice


def test_silence_within_a_message_is_no_standstill() -> None:
    """A back end tells of whole messages, each of which takes seconds."""
    asker = Asker(4)
    move = asker.hear(10.0, final=True)
    asker.machine.moving(Moving(((move.ref, 5),)), 14.0)
    failure = asker.end(100.0)[1].outcome.failure
    assert "5 B of " in failure.detail and ", and more was coming" in failure.detail
    assert "at that rate it takes" in failure.advice


def test_time_in_which_nothing_was_on_its_way_is_no_silence() -> None:
    asker = Asker()
    first = asker.hear(10.0)
    asker.machine.moved(Moved(first.ref, None, True, first.plan.nbytes), 10.5)
    second = asker.hear(14.0, part=1)
    asker.machine.moving(Moving(((second.ref, 5),)), 14.5)
    failure = asker.end(100.0)[1].outcome.failure
    assert "nothing for 3.5 s" in failure.detail and "stopped coming" in failure.advice


class Written(Asker):
    """An ``Asker`` whose producer writes, so that it sees nothing of a part before all of it has come."""

    mode: Mode = "write"

    def told(self, moved: int, now: float, nbytes: int = 100) -> None:
        assert self.machine.message("link", m.Underway(T, self.asked.attempt, moved, nbytes), now) == []


def test_what_is_written_slowly_is_told_by_the_producer() -> None:
    asker = Written()
    asker.told(0, 46.0)
    asker.told(40, 53.5)
    at, ended = asker.end(100.0)
    failure = ended.outcome.failure
    assert at == 46.0 + TIMEOUT, "the first part has begun, so it is not the producer's queue that takes so long"
    assert failure.kind is FailureKind.TIMED_OUT
    assert "40 B of 100 B announced so far had come in 8.0 s, 5 B/s, and more was coming" in failure.detail
    assert "at that rate it takes 20 s" in failure.advice
    assert (ended.nbytes, ended.stages.came, ended.stages.announced_bytes) == (40, 40, 100)


def test_what_a_producer_tells_without_end_delays_nothing() -> None:
    asker = Written()
    for second in range(10, 18):
        assert asker.end(second) is None
        asker.told(second, float(second))
    assert asker.end(100.0)[0] == 10.0 + TIMEOUT


def test_a_producer_that_does_not_write_has_nothing_to_tell() -> None:
    asker = Asker()
    asker.machine.message("link", m.Underway(T, asker.asked.attempt, 40, 100), 10.0)
    at, ended = asker.end(100.0)
    assert at == START and ended.outcome.kind is FailureKind.NEVER_OFFERED and ended.nbytes == 0


def test_a_producer_tells_how_far_it_has_got() -> None:
    machine = ProducerMachine(60.0, 30.0)
    machine.link_up("link", LinkInfo("write", PLANNER, peer=1), 0.0)
    machine.message("link", m.FetchRequest(T, 1, RIGHT, 0, 4, TABLE, 1, 5.0, moving=8.0), 0.0)
    (move,) = machine.offer(Offer(T, RIGHT, 1, 4, TABLE, True), 0.0)
    assert isinstance(move, Move)
    (sent,) = machine.moving(Moving(((move.ref, 7),)))
    assert sent == Send("link", m.Underway(T, 1, 7, move.plan.nbytes))
    machine.moved(Moved(move.ref, None, True, move.plan.nbytes), 2.0)
    assert machine.moving(Moving(((move.ref, 9),))) == [], "it has ended"
