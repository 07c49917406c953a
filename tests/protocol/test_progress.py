"""What a transfer that fails says of how far it had got."""

from __future__ import annotations

from kvxfer.failures import FailureKind
from kvxfer.protocol.values import Moved, Moving
from kvxfer.text import size
from tests.protocol.test_deadlines import TIMEOUT, Asker


def test_what_comes_slowly_says_how_much_and_how_fast_and_what_to_set() -> None:
    asker = Asker()
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


def test_what_has_stopped_within_a_part_stands_still() -> None:
    asker = Asker()
    move = asker.hear(10.0, final=True)
    asker.machine.moving(Moving(((move.ref, 5),)), 11.0)
    failure = asker.end(100.0)[1].outcome.failure
    assert "5 B of " in failure.detail and "nothing for 7.0 s" in failure.detail and "stopped coming" in failure.advice


def test_nothing_at_all() -> None:
    asker = Asker()
    move = asker.hear(10.0, final=True)
    failure = asker.end(100.0)[1].outcome.failure
    assert f"0 of {size(move.plan.nbytes)} had come after 8.0 s" in failure.detail


def test_what_is_late_for_an_attempt_that_is_over_changes_nothing() -> None:
    asker = Asker()
    move = asker.hear(10.0, final=True)
    asker.machine.moved(Moved(move.ref, None, True, move.plan.nbytes), 11.0)
    asker.machine.moving(Moving(((move.ref, 1),)), 12.0)
    stages = asker.end(100.0)[1].stages
    assert (stages.came, stages.last) == (move.plan.nbytes, 11.0)
