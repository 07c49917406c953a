"""The blocks of a transfer that is offered again are released only once nothing of its earlier offer moves any more."""

from __future__ import annotations

import pytest

from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Planner, ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.values import Abort, Action, Emit, LinkInfo, Move, Moved, Released
from kvxfer.testing.engine import PagedMemory
from kvxfer.values import BlockTable, Offer

T = TransferId("own/1/again", 0)
CACHES = [PagedMemory().caches[0] for _ in range(2)]
PLANNER = Planner(CACHES[0], CACHES[1], (ShardAssignment(0, 0, CACHES[0].views[0].layers, 0, 4),))
GONE = Failure(FailureKind.WITHDRAWN, "aborted")
LEASE = 5.0


def released(actions: list[Action]) -> list[int | None]:
    return [a.event.generation for a in actions if isinstance(a, Emit) and isinstance(a.event, Released)]


@pytest.mark.parametrize("asked", ["before it is offered again", "after that", "once its end is forgotten", "never"])
def test_an_offer_made_again_is_released_after_the_earlier_one(asked: str) -> None:
    """Whether or not a consumer has asked for it in between, as for a generation that another rank has announced."""
    machine = ProducerMachine(LEASE, 30.0)
    for peer in (1, 2):
        machine.link_up(b"%d" % peer, LinkInfo("write", PLANNER, peer=peer), 0.0)

    def ask(peer: int, least: int, now: float) -> None:
        machine.message(b"%d" % peer, m.FetchRequest(T, 1, b"d", 0, 4, BlockTable.of([[1]]), 1, 60.0, least=least), now)

    ask(1, 0, 0.0)
    (move,) = [a for a in machine.offer(Offer(T, b"d", 0, 4, BlockTable.of([[2]]), True), 0.0) if isinstance(a, Move)]
    assert not released(machine.revoke(T, 0, GONE, True, 1.0)), "it is still being written from"
    now = 2.0
    if asked == "once its end is forgotten":
        now = 1.0 + 2 * LEASE
        machine.tick(now)
    if asked in ("before it is offered again", "once its end is forgotten"):
        ask(2, 1, now)
    machine.offer(Offer(T, b"d", 1, 4, BlockTable.of([[2]]), True), now)
    assert machine.offered == 2, "the offer of the next generation counts although the earlier one is over"
    if asked == "after that":
        ask(2, 1, now)
    again = machine.revoke(T, 1, GONE, True, now)
    again += machine.link_down(b"2", GONE, now)
    for ref in [a.ref for a in again if isinstance(a, Abort)]:
        again += machine.moved(Moved(ref, GONE, True, 0), now)
    assert not released(again), "the blocks of both may still be read for the earlier one"
    assert released(machine.moved(Moved(move.ref, GONE, True, 0), now)) == [0, 1]
    assert len(machine) == 0


def test_a_late_revocation_of_an_earlier_generation_leaves_the_newer_offer() -> None:
    """As where an engine's rank hears of both in one step."""
    machine = ProducerMachine(LEASE, 30.0)
    machine.link_up(b"1", LinkInfo("write", PLANNER, peer=1), 0.0)
    machine.offer(Offer(T, b"d", 1, 4, BlockTable.of([[2]]), True), 0.0)
    machine.revoke(T, 0, GONE, False, 1.0)
    asked = machine.message(b"1", m.FetchRequest(T, 1, b"d", 0, 4, BlockTable.of([[1]]), 1, 60.0), 1.0)
    assert any(isinstance(action, Move) for action in asked)


def test_an_offer_of_less_than_before_takes_nothing_back() -> None:
    machines = [ProducerMachine(LEASE, 30.0) for _ in range(2)]
    moved = []
    for machine, offers in zip(machines, ([2], [2, 1]), strict=True):
        machine.link_up(b"1", LinkInfo("write", PLANNER, peer=1), 0.0)
        for blocks in offers:
            machine.offer(Offer(T, b"d", 0, 4 * blocks, BlockTable.of([[2, 3][:blocks]]), False), 0.0)
        asked = machine.message(b"1", m.FetchRequest(T, 1, b"d", 0, 8, BlockTable.of([[1, 4]]), 1, 60.0), 1.0)
        moved.append([action.plan.nbytes for action in asked if isinstance(action, Move)])
    assert moved[0] == moved[1] != []


def test_a_transfer_that_has_ended_ends_again_for_a_newer_generation_alone() -> None:
    """One that was never offered here: an engine waits until all ranks have ended the last generation that it has named."""
    machine = ProducerMachine(LEASE, 30.0)
    machine.offer(Offer(T, b"d", 0, 4, BlockTable.of([[2]]), True), 0.0)
    assert [released(machine.revoke(T, g, GONE, True, 1.0)) for g in (0, 0, 1, 1, 0)] == [[0], [], [1], [], []]
