"""Shares by peer: hosts first, then the engines that a host claims to be, then their connections."""

from __future__ import annotations

import pytest

from kvxfer.failures import FailureKind
from kvxfer.identity import Generation, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity, largest_group
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.shares import Debts, ExpiringMap, IndexedExpiringMap, Shares
from kvxfer.protocol.values import Action, Emit, Ended, LinkInfo, Send
from kvxfer.values import Offer
from tests.protocol.test_doors import PLANNER, TABLE, T


def test_who_goes_is_of_the_host_and_then_of_the_engine_that_has_most() -> None:
    crowd = [("a", "x"), ("b", "one"), ("b", "two"), ("b", "one"), ("a", "x"), ("b", "three")]
    found = largest_group([(i, PeerIdentity(*who)) for i, who in enumerate(crowd)], lambda member: member[1])
    assert [i for i, _ in found] == [1, 3]


def test_names_that_a_host_makes_up_cost_its_own_share() -> None:
    budgets: Shares[str, int] = Shares(100, "newest")
    for i in range(100):
        assert budgets.take(f"sybil {i}", i, 1, PeerIdentity("a", f"name {i}")) == []
    lost = budgets.take("honest", 100, 50, PeerIdentity("b"))
    assert lost is not None and len(lost) == 50
    assert budgets.take("sybil 100", 101, 1, PeerIdentity("a", "name 100")) is None, "its host has half"
    assert budgets.take("another", 102, 10, PeerIdentity("b", "other")) == [100], "from its own host"
    assert budgets.take("newcomer", 103, 10, PeerIdentity("c")) is not None


def test_owners_and_groups_that_are_gone_leave_nothing() -> None:
    budgets: Shares[str, int] = Shares(10, "newest")
    for i in range(100):
        budgets.take(f"{i}", 1, 1, PeerIdentity(f"{i}", f"{i}"))
        budgets.give(f"{i}", 1)
        assert list(budgets._owners) == [f"{i}"], "the others are forgotten"
    budgets.leave("99")
    assert not budgets._owners and not budgets._all.inside and budgets._all.total == 0


def test_an_owner_counts_for_the_peer_that_it_has_proved_to_be_since() -> None:
    shares: Shares[str, str] = Shares(100, "nothing")
    unproved, proved = PeerIdentity("host"), PeerIdentity("host", key="key")
    shares.take("connection", "hello", 10, unproved)
    shares.give("connection", "hello")
    shares.take("connection", "message", 40, proved)
    assert shares.room(proved) == 75 - 40
    assert shares.room(unproved) == 45


def test_what_is_remembered_last_stays_though_its_owner_has_had_something_before() -> None:
    keep: IndexedExpiringMap[str, int, int] = IndexedExpiringMap(10.0, 1)
    for key, owner in enumerate(["a", "b", "a"]):
        keep.put(owner, key, key, 0.0, PeerIdentity(owner))
        assert keep.get(owner, key) == key and len(keep) == 1
        assert [keep.owners(one) for one in range(3)] == [[owner] if one == key else [] for one in range(3)]


def test_debts_that_are_paid_are_forgotten() -> None:
    debts: Debts[str] = Debts()
    debts.add("one", 1.0, 0.0)
    debts.add("two", 5.0, 0.5)
    debts.add("three", 1.0, 2.0)
    assert list(debts._owed) == ["two", "three"] and debts.of("two", 2.0) == 3.5
    debts.add("four", 0.0, 9.0)
    assert not debts._owed


@pytest.mark.parametrize("most", [1, 3])
def test_owners_that_a_host_makes_up_push_out_none_of_another_host(most: int) -> None:
    """Connections, and numbers of readers, are what a process likes to make of them."""
    keep: ExpiringMap[str, int, int] = ExpiringMap(10.0, 60)
    for i in range(10):
        keep.put("honest", i, i, 0.0, PeerIdentity("a"))
    for i in range(1000):
        keep.put(f"sybil {i // most}", i % most, i, 1.0, PeerIdentity("b", f"name {i // most}"))
    assert all(keep.get("honest", i) == i for i in range(10))
    assert len(keep) == 60 and keep.get(f"sybil {999 // most}", 999 % most) == 999
    keep.forget(20.0)
    assert not len(keep)
    keep.put("newcomer", 0, 0, 20.0)
    assert list(keep._shares._owners) == ["newcomer"], "the others are forgotten"


def closes(machine: ProducerMachine, link: bytes, transfer: TransferId, attempt: int = 1) -> list[Action]:
    why = FailureKind.CANCELLED, "changed its mind"
    return machine.message(link, m.CloseAttempt(transfer, attempt, b"right", *why), 0.0)


@pytest.mark.parametrize("what", ["an early refusal", "a last word"])
def test_numbers_of_readers_that_one_host_makes_up_push_out_nothing_of_another(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("producer", "serves"):
        monkeypatch.setattr(f"kvxfer.protocol.{module}.MAX_WORDS", 50)
    machine = ProducerMachine(60.0, 30.0)
    machine.link_up(b"honest", LinkInfo("read", PLANNER, peer=1, owner=PeerIdentity("a", "engine")), 0.0)
    for attempt in (1, 2):
        closes(machine, b"honest", T, attempt)
    for i in range(200):
        link = f"{i}".encode()
        machine.link_up(link, LinkInfo("read", PLANNER, peer=2 + i, owner=PeerIdentity("b", f"name {i}")), 0.0)
        closes(machine, link, TransferId("own/1/other", i))
    if what == "an early refusal":
        actions = machine.offer(Offer(T, b"right", Generation(1), 4, TABLE, True), 0.0)
        assert any(isinstance(a, Emit) and isinstance(a.event, Ended) for a in actions), "it waits for its lease"
    else:
        ask = m.FetchRequest(T, 1, b"right", 0, 4, TABLE, 1, 5.0)
        (said,) = machine.message(b"honest", ask, 0.0)
        assert isinstance(said, Send) and isinstance(said.message, m.AttemptClosed), "it is served once more"


@pytest.mark.parametrize("owners", [1, 2, 5])
def test_a_newcomer_keeps_as_many_values_as_others_whoever_came_first(owners: int) -> None:
    """It had one at a time: whoever came first had taken half of what was left, and the next half of that."""
    keep: ExpiringMap[str, int, int] = ExpiringMap(10.0, 60)
    for owner in range(owners):
        for i in range(100):
            keep.put(f"{owner}", i, i, 0.0)
    for i in range(100):
        keep.put("newcomer", i, i, 1.0)
    assert sum(keep.get("newcomer", i) is not None for i in range(100)) >= 60 // (owners + 1)
    assert len(keep) == 60
