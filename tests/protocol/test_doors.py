"""A consumer at the wrong door costs the right one nothing, nor does one that asks for more than its share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.failures import FailureKind
from kvxfer.geometry import Planner, ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol import serves
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.shares import ExpiringMap, Shares
from kvxfer.protocol.values import Action, Emit, Ended, Failure, LinkInfo, Outcome, Released, Send
from kvxfer.testing.engine import PagedMemory
from kvxfer.values import BlockTable, Offer

CUT = Failure(FailureKind.PEER_LOST, "cut")
T = TransferId("own/1/door", 0)
LEASE, LONGEST = 60.0, 30.0
MONTH = 30 * 86400.0
CACHES = [PagedMemory().caches[0] for _ in range(2)]
PLANNER = Planner(CACHES[0], CACHES[1], (ShardAssignment(0, 0, CACHES[0].views[0].layers, 0, 4),))
RIGHT, WRONG = b"right", b"wrong"
TABLE = BlockTable.of([[1]])


class Door:
    """A producer's machine with links to the right consumer (its agent's epoch is 1) and to others."""

    def __init__(self) -> None:
        self.machine = ProducerMachine(LEASE, LONGEST)
        self.now = 0.0
        self.events: list[Any] = []
        self.epochs: dict[bytes, int] = {}
        for peer in (RIGHT, WRONG, b"third"):
            self.link(peer)

    def link(self, peer: bytes) -> None:
        epoch = self.epochs.setdefault(peer, len(self.epochs) + 1)
        self.machine.link_up(peer, LinkInfo("read", PLANNER, peer=epoch), self.now)

    def does(self, actions: list[Action]) -> list[m.Message]:
        self.events += [a.event for a in actions if isinstance(a, Emit)]
        return [a.message for a in actions if isinstance(a, Send)]

    def says(self, who: bytes, msg: m.Message) -> list[m.Message]:
        return self.does(self.machine.message(who, msg, self.now))

    def want(self, who: bytes, attempt: int = 1, digest: bytes | None = None, **more: Any) -> list[m.Message]:
        values = {"start": 0, "tokens": 4, "blocks": TABLE, "readers": 1, "seconds": 5.0, **more}
        return self.says(who, m.FetchRequest(T, attempt, who if digest is None else digest, **values))

    def drop(self, who: bytes, attempt: int = 1, digest: bytes | None = None) -> list[m.Message]:
        return self.says(
            who,
            m.CloseAttempt(T, attempt, who if digest is None else digest, FailureKind.CANCELLED, "changed its mind"),
        )

    def offer(self, generation: int = 1, tokens: int = 4, final: bool = True) -> list[m.Message]:
        return self.does(self.machine.offer(Offer(T, RIGHT, generation, tokens, BlockTable.of([[2]]), final), self.now))

    def at(self, now: float) -> list[m.Message]:
        out: list[m.Message] = []
        while (due := self.machine.next_tick()) is not None and due <= now:
            self.now = max(self.now, due)
            out += self.does(self.machine.tick(self.now))
        self.now = now
        return out


STRANGERS: dict[str, Callable[[Door], Any]] = {
    "wants something else": lambda d: d.want(WRONG),
    "wants something else, for many": lambda d: d.want(WRONG, readers=1000),
    "wants something else, and drops it": lambda d: (d.want(WRONG), d.drop(WRONG)),
    "drops by name what it never wanted": lambda d: d.drop(WRONG),
    "drops by name, over and over": lambda d: [d.drop(WRONG, i) for i in range(1, 50)],
    "drops an attempt of the right one": lambda d: d.drop(WRONG, 1, b""),
    "says by name that it is done": lambda d: d.says(WRONG, m.Committed(T, 1, WRONG)),
    "checks what it was never given": lambda d: d.says(WRONG, m.CommitRequest(T, 1, 1)),
    "wants a month of it": lambda d: d.want(WRONG, seconds=MONTH),
    "wants more than there is": lambda d: (d.want(WRONG, digest=RIGHT, tokens=9), d.drop(WRONG, 1, RIGHT)),
    "asks early and cancels, of the right digest, while the right one waits": lambda d: (
        d.want(RIGHT),
        d.want(WRONG, digest=RIGHT),
        d.drop(WRONG, 1, RIGHT),
    ),
    "wants something else, and is lost": lambda d: (d.want(WRONG), d.does(d.machine.link_down(WRONG, CUT, d.now))),
    "wants the same, and is lost": lambda d: (
        d.want(WRONG, digest=RIGHT, readers=5),
        d.does(d.machine.link_down(WRONG, CUT, d.now)),
    ),
}


@pytest.mark.parametrize(
    "when", ["before the offer", "before all is offered", "after the offer", "after the right one"]
)
@pytest.mark.parametrize("what", STRANGERS)
def test_a_stranger_costs_the_right_consumer_nothing(what: str, when: str) -> None:
    door = Door()
    early = "more than there is" in what and when.startswith("before")
    if early or ("waits" in what and when != "before the offer"):
        pytest.skip("that is no stranger then")
    if when == "before the offer":
        STRANGERS[what](door)
    if when == "before all is offered":
        door.offer(tokens=0, final=False)
        STRANGERS[what](door)
    door.offer()
    if when == "after the offer":
        STRANGERS[what](door)
    if "waits" not in what:
        door.want(RIGHT)
    if when == "after the right one":
        STRANGERS[what](door)
    assert not door.events, door.events
    [verdict] = door.says(RIGHT, m.CommitRequest(T, 1, 1))
    assert isinstance(verdict, m.CommitAck), verdict
    assert [type(e) for e in door.events] == [Ended, Released], "the blocks stay for a lease"
    assert door.events[0].outcome == Outcome()


def test_a_commit_of_a_generation_that_was_not_announced_to_it_is_refused() -> None:
    door = Door()
    door.offer()
    door.want(RIGHT)
    [said] = [a for a in door.says(RIGHT, m.CommitRequest(T, 1, 0)) if isinstance(a, m.AttemptClosed)]
    assert said.kind is FailureKind.REVOKED and not any(isinstance(e, Ended) for e in door.events)


def test_who_was_told_that_it_is_offered_hears_at_once_that_it_is_forgotten() -> None:
    door = Door()
    door.offer()
    door.at(3 * LEASE)  # it has ended, and that is forgotten too
    door.events.clear()
    begun = door.now
    assert not door.want(RIGHT, seconds=20.0, offered=True)
    [closed] = door.at(begun + serves.GRACE_S)
    assert closed.kind is FailureKind.WITHDRAWN and not closed.again, closed
    assert "not known here any more" in closed.reason
    assert not door.machine.holds(T)


def test_a_rank_that_lags_is_waited_for() -> None:
    door = Door()
    door.want(RIGHT, seconds=20.0, offered=True)
    door.at(serves.GRACE_S / 2)
    assert [type(said) for said in door.offer()] == [m.PartReady]
    assert not door.at(19.0)
    [closed] = door.at(20.0)
    assert closed.kind is FailureKind.TIMED_OUT


def test_what_is_being_computed_anew_is_waited_for() -> None:
    door = Door()
    door.offer(final=False)
    door.does(door.machine.revoke(T, 1, Failure(FailureKind.REVOKED, "preempted"), False, door.now))
    door.want(RIGHT, seconds=20.0, offered=True)
    assert not door.at(19.0)
    assert [type(said) for said in door.offer(generation=2)] == [m.PartReady]


def test_one_that_knows_the_digest_may_give_it_up_before_it_is_there() -> None:
    door = Door()
    door.want(RIGHT)
    door.drop(RIGHT)
    door.offer()
    assert [type(e) for e in door.events] == [Ended, Released]
    assert door.events[0].outcome.kind is FailureKind.CANCELLED


def test_a_want_is_kept_no_longer_than_the_producer_keeps_any() -> None:
    """One that still waits may ask anew; one that is being served has had its time."""
    door = Door()
    door.want(RIGHT, seconds=MONTH)
    [gone] = door.at(LONGEST)
    assert isinstance(gone, m.AttemptClosed) and gone.again
    door.want(RIGHT, 2, seconds=MONTH)
    door.offer()
    [gone] = door.at(2 * LONGEST)
    assert isinstance(gone, m.AttemptClosed) and not gone.again
    door.at(2 * LONGEST + 2 * LEASE)
    assert [type(e) for e in door.events] == [Ended, Released]
    assert len(door.machine) == 0


def hoard(door: Door, link: bytes, n: int, table: BlockTable = TABLE) -> list[m.Message]:
    """Wants for so many things that nobody offers; returns what is said to them."""
    name = f"hoard {link!r}"
    wants = [m.FetchRequest(TransferId(name, i), i + 1, link, 0, 4, table, 1, MONTH) for i in range(n)]
    return [said for want in wants for said in door.says(link, want)]


def overloaded(said: list[m.Message]) -> int:
    assert all(isinstance(x, m.AttemptClosed) and x.kind is FailureKind.OVERLOADED for x in said)
    return len(said)


@pytest.mark.parametrize("table", [TABLE, BlockTable((bytes(100_000),))], ids=["small", "large"])
def test_however_many_links_take_all_they_can_the_next_one_finds_room(
    monkeypatch: pytest.MonkeyPatch, table: BlockTable
) -> None:
    each = serves.REQUEST_BYTES + table.nbytes
    monkeypatch.setattr(serves, "MAX_BYTES", 1000 * each)
    door = Door()
    greedy = [b"greedy %d" % i for i in range(200)]
    for link in greedy:
        door.link(link)
    assert overloaded(hoard(door, greedy[0], 1001, table)) == 1, "one has all as long as it is alone"
    for link in greedy[1:]:
        hoard(door, link, 1001, table)
    held = [sum(s.link == link for s in door.machine._serves.values()) for link in greedy]
    assert set(held) <= {4, 5, 6} and sum(held) == 1000
    [victim] = door.want(RIGHT)
    assert overloaded([victim]) and b"greedy" in victim.transfer.base.encode()
    door.offer()
    assert isinstance(door.says(RIGHT, m.CommitRequest(T, 1, 1))[0], m.CommitAck)
    for link in greedy:
        door.does(door.machine.link_down(link, CUT, door.now))
    assert len(door.machine) == 0
    assert not hoard(door, WRONG, 1000, table)


def test_answers_to_one_reader_do_not_push_out_those_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serves, "MAX_WORDS", 100)
    door = Door()
    door.offer()
    door.want(RIGHT)
    assert isinstance(door.says(RIGHT, m.CommitRequest(T, 1, 1))[0], m.CommitAck)
    for i in range(1000):
        door.says(WRONG, m.CloseAttempt(TransferId("noise", i), i + 1, WRONG, FailureKind.CANCELLED, "noise"))
    door.does(door.machine.link_down(RIGHT, CUT, door.now))
    door.link(RIGHT)
    assert isinstance(door.says(RIGHT, m.CommitRequest(T, 1, 1))[0], m.CommitAck), "what was said last is said again"


@settings(max_examples=200)
@given(
    st.sampled_from(["newest", "oldest"]),
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 12), st.booleans()), max_size=200),
)
def test_whoever_wants_no_more_than_an_equal_share_has_it(
    loses: Literal["newest", "oldest"], steps: list[tuple[int, int, bool]]
) -> None:
    """Whatever the others want, and whenever; nobody loses anything while something is left."""
    budgets: Shares[int, int] = Shares(100, loses)
    held: dict[int, tuple[int, int]] = {}
    for key, (owner, n, gives) in enumerate(steps):
        mine = [k for k, (whose, _) in held.items() if whose == owner]
        if gives and mine:
            budgets.give(owner, mine[0])
            del held[mine[0]]
            continue
        left = 100 - sum(size for _, size in held.values())
        lost = budgets.take(owner, key, n)
        would = sum(held[k][1] for k in mine) + n
        assert lost is not None or would > 100 // 8
        assert not lost or n > left
        if lost is None:
            assert n > left
            continue
        held[key] = owner, n
        for k in lost:
            whose, _ = held[k]
            size = sum(size for other, size in held.values() if other == whose)
            assert size > would or (loses == "oldest" and size > 100 // 8)
            its = [other for other, (o, _) in held.items() if o == whose]
            assert k == (its[-1] if loses == "newest" else its[0])
            del held[k]
        assert sum(size for _, size in held.values()) <= 100


def test_those_who_have_left_have_one_share_together() -> None:
    budgets: Shares[str, int] = Shares(100, "newest")
    for i in range(100):
        assert budgets.take(f"{i}", i, 1) == []
        budgets.merge(f"{i}", "gone")
    assert budgets.take("here", 100, 50) == list(range(99, 49, -1))
    budgets.give("gone", 3)
    assert budgets.take("another", 101, 1) == []


def test_a_keep_forgets_in_order_and_no_more_than_it_must() -> None:
    keep: ExpiringMap[str, int, int] = ExpiringMap(10.0, 10)
    for i in range(100):
        keep.put("greedy", i, i, 0.0)
    keep.put("other", 1, 1, 1.0)
    assert len(keep) <= 10 and keep.get("greedy", 99) == 99 and keep.get("greedy", 0) is None
    for i in range(100):
        keep.put("greedy", i, i, 2.0)
    assert keep.get("other", 1) == 1
    for i in range(30):
        keep.put(f"one of many {i}", 0, 0, 3.0)
    assert len(keep) <= 10
    keep.forget(13.0)
    assert len(keep) == 0 and keep.next() is None


def test_an_offer_that_nobody_got_says_why_the_last_one_that_asked_did_not() -> None:
    """Its lease is not to blame, nor the router, if who asked was refused or is gone."""

    def ended(door: Door) -> Failure:
        door.at(3 * LEASE)
        failure = next(e for e in door.events if isinstance(e, Ended)).outcome.failure
        assert failure is not None and failure.kind is FailureKind.UNFETCHED
        return failure

    other, more, gone, none = Door(), Door(), Door(), Door()
    for door in (other, more, gone, none):
        door.offer()
    other.want(WRONG)
    assert "the digests differ" in ended(other).detail and "params of the same request" in ended(other).advice
    more.want(RIGHT, tokens=9)
    assert "holds 4 tokens, the consumer wants 9" in ended(more).detail
    gone.want(RIGHT)
    gone.does(gone.machine.link_down(RIGHT, Failure(FailureKind.PEER_LOST, "it was silent", "d at host"), gone.now))
    assert "it was silent" in ended(gone).detail and ended(gone).peer == "d at host"
    assert "read the end of its log" in ended(gone).advice
    assert "no engine has asked for it" in ended(none).detail
