"""How long a transfer may take: until its producer begins, and from then on. The producer's queue is not the network's fault."""

from __future__ import annotations

from kvxfer.failures import FailureKind
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.serves import CONSUMER_FIRST_S
from kvxfer.protocol.values import Action, Emit, Ended, LinkInfo, Mode, Move, Moved, PartRef, RankRoute, Resolved, Send
from kvxfer.values import BlockTable, Fetch
from tests.protocol.test_doors import LONGEST, MONTH, PLANNER, RIGHT, Door, T

START, TIMEOUT = 50.0, 8.0
SOURCE = Source("p", 1, 1)


class Asker:
    """A consumer's machine whose fetch has begun at 0, with a link to its producer."""

    mode: Mode = "read"

    def __init__(self, tokens: int = 12) -> None:
        self.machine = ConsumerMachine(START, TIMEOUT)
        self.machine.fetch(Fetch("req", T, RIGHT, SOURCE, BlockTable.of([[5, 6, 7]]), 0, tokens), 0.0)
        self.machine.resolved(SOURCE, Resolved((RankRoute("link", 1),)), 0.0)
        (self.asked,) = self.requests(self.machine.link_up("link", LinkInfo(self.mode, PLANNER), 0.0))

    def requests(self, actions: list[Action]) -> list[m.FetchRequest]:
        return [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, m.FetchRequest)]

    def hear(self, now: float, part: int = 0, final: bool = False) -> Move:
        """A part is announced."""
        lo, table = 4 * part, BlockTable.of([[2 + part]])
        ready = m.PartReady(T, self.asked.attempt, 1, part, lo, lo + 4, final, table, part, 0)
        (move,) = self.machine.message("link", ready, now)
        assert isinstance(move, Move)
        return move

    def end(self, until: float) -> tuple[float, Ended] | None:
        """When it ends, and how, if that is not later."""
        while (due := self.machine.next_tick()) is not None and due <= until:
            for action in self.machine.tick(due):
                if isinstance(action, Emit) and isinstance(action.event, Ended):
                    return due, action.event
        return None


def test_a_producer_that_never_begins() -> None:
    asker = Asker()
    at, ended = asker.end(100.0)
    assert at == START and ended.outcome.kind is FailureKind.NEVER_OFFERED
    assert ended.outcome.failure.detail == "nothing came within 50 s (still requested)"


def test_one_that_begins_late_has_all_the_time_for_the_transfer() -> None:
    asker = Asker()
    asker.hear(49.0)
    assert asker.end(56.9) is None
    at, ended = asker.end(100.0)
    assert at == 49.0 + TIMEOUT and ended.outcome.kind is FailureKind.TIMED_OUT
    assert ended.outcome.failure.detail.startswith("no outcome within 8 s of the first part (still moving); 0 of ")


def test_the_producer_knows_both_and_of_a_later_attempt_what_is_left() -> None:
    asker = Asker()
    assert (asker.asked.seconds, asker.asked.moving) == (START, TIMEOUT)
    asker.hear(10.0)
    closed = m.AttemptClosed(T, asker.asked.attempt, FailureKind.REVOKED, "preempted", True)
    asker.machine.message("link", closed, 12.0)
    part = PartRef("consumer", "link", T, asker.asked.attempt, 0)
    (again,) = asker.requests(asker.machine.moved(Moved(part, None, True, 0), 12.0))
    assert (again.seconds, again.moving) == (10.0 + TIMEOUT - 12.0, 0.0)


def parts(said: list[m.Message]) -> int:
    return sum(isinstance(x, m.PartReady) for x in said)


def test_what_is_served_is_kept_for_the_time_that_moving_may_take_and_its_consumer_ends_it_first() -> None:
    door = Door()
    door.want(RIGHT, tokens=8, blocks=BlockTable.of([[1, 2]]), seconds=20.0, moving=8.0)
    assert not door.at(19.0)
    assert parts(door.offer(final=False)) == 1
    assert not door.at(27.0 + CONSUMER_FIRST_S - 0.1)
    (closed,) = door.at(27.0 + CONSUMER_FIRST_S)
    assert "the consumer's time for it is over" in closed.reason
    assert isinstance(closed, m.AttemptClosed) and closed.kind is FailureKind.TIMED_OUT


def test_no_peer_has_more_of_it_than_the_producer_grants() -> None:
    door = Door()
    door.want(RIGHT, tokens=8, blocks=BlockTable.of([[1, 2]]), seconds=5.0, moving=MONTH)
    assert parts(door.offer(final=False)) == 1
    assert not door.at(LONGEST + CONSUMER_FIRST_S - 0.1)
    (closed,) = door.at(LONGEST + CONSUMER_FIRST_S)
    assert isinstance(closed, m.AttemptClosed) and "of this producer" in closed.reason
