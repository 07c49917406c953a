"""Two agents, one transfer: every verb, both orders, several ranks, several parts."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvxfer.control.calls import CallValidator
from kvxfer.identity import TransferId
from kvxfer.values import BlockTable
from tests.conftest import require
from tests.control.conftest import Ended, FailureKind, Released, fetch, offered, until

VERBS = {
    "read": {"verbs": ["read"]},
    "unattended read": {"verbs": ["read"], "factored": True},
    "write": {"verbs": ["write"]},
    "sendrecv": {"verbs": ["send", "recv"]},
    "all": {},
    "staged sendrecv": {"verbs": ["send", "recv"], "gathers": False},
    "staged read": {"verbs": ["read"], "gathers": False},
    "staged write": {"verbs": ["write"], "gathers": False},
    "zmq": {"backend": "zmq"},
}
T = TransferId("own/1/x", 0)


@pytest.fixture(params=VERBS, ids=str)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(VERBS[request.param])


@pytest.mark.parametrize("first", ["offer", "want"])
def test_bytes_arrive_whichever_side_comes_first(engine, options, first):
    p, d = engine(dict(options), seed=1), engine(dict(options))
    calls = [
        lambda: p.agents[0].offer(offered([3, 1, 7], 11, transfer=T)),
        lambda: d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T)),
    ]
    for call in calls if first == "offer" else reversed(calls):
        call()
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    d.wait(Released)
    (said,) = p.wait(Ended)
    assert said.outcome.delivered
    p.wait(Released)
    assert np.array_equal(d.block(5), p.block(3)) and np.array_equal(d.block(2), p.block(1))
    assert np.array_equal(d.block(9)[:, :, :3], p.block(7)[:, :, :3])
    assert not d.block(9)[:, :, 3].any(), "the token beyond the transfer was touched"
    assert said.nbytes == end.nbytes == 11 * 3 * 4 * 16
    s = end.stages
    assert 0 < s.began <= s.asked <= s.announced <= s.heard <= s.arrived <= s.ended


def test_block_tables_that_do_not_join_fail_alone(engine, options, monkeypatch):
    monkeypatch.setattr(CallValidator, "offer", lambda *_: None)  # an agent that lets its engine say anything
    p, d = engine(dict(options), seed=1), engine(dict(options))
    p.agents[0].offer(offered([3], 11, transfer=T))  # one block for eleven tokens
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T, handle="short"))
    (end,) = d.wait(Ended)
    assert end.outcome.kind is FailureKind.MISUSE and "has no block for token 4" in end.outcome.failure.detail
    d.wait(Released)
    other = TransferId("own/1/y", 0)
    p.agents[0].offer(offered([3, 1, 7], 11, transfer=other))
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=other, handle="whole"))
    assert d.wait(Ended, count=2)[1].outcome.delivered
    assert np.array_equal(d.block(2), p.block(1))


def test_who_stood_still_in_the_middle_of_a_turn_blames_no_peer(clock, engine):
    """Longer than it bears silence: what the peer has said meanwhile it has not read yet."""

    class Freezing:
        event, over = None, threading.Event()

        def passed(self) -> bool:
            clock.forward(50.0)
            self.over.set()
            return True

    config = {"transfer_timeout": 300.0, "lease": 300.0, "peer_timeout": 30.0}
    p, d = engine({}, seed=1, **config), engine({}, **config)
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    p.agents[0].offer(offered([3], 4, transfer=T, final=False))
    until(lambda: d.block(5).any())
    d.agents[0].offer(offered([1], 4, transfer=TransferId("own/1/z", 0)), after=Freezing())
    assert Freezing.over.wait(60)
    p.agents[0].offer(offered([3, 1, 7], 11, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end


@pytest.mark.parametrize(("tp_p", "tp_d"), [(2, 2), (1, 2), (2, 1), (4, 1), (2, 4)])
def test_several_ranks(engine, options, tp_p, tp_d):
    p, d = engine(dict(options), tp=tp_p, seed=1), engine(dict(options), tp=tp_d)
    for a in p.agents:
        a.offer(offered([3, 1], 8, transfer=T))
    for a in d.agents:
        a.fetch(fetch(p.source, [5, 2], 8, transfer=T, own=d.source))
    for r in range(tp_d):
        assert d.wait(Ended, r)[0].outcome.delivered
        d.wait(Released, r)
    for r in range(tp_p):
        assert p.wait(Ended, r)[0].outcome.delivered
        p.wait(Released, r)
    for a, b in ((5, 3), (2, 1)):
        got = np.concatenate([d.block(a, r) for r in range(tp_d)], axis=1)
        assert np.array_equal(got, np.concatenate([p.block(b, r) for r in range(tp_p)], axis=1))


def test_a_producer_may_begin_later_than_a_transfer_may_take(clock, engine, options):
    p, d = engine(dict(options), seed=1), engine(dict(options), start_timeout=600.0, transfer_timeout=60.0)
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    until(lambda: p.agents[0]._runtime.producer.holds(T))
    clock.forward(100.0)  # its request waits in the producer's queue
    d.agents[0].fetch(fetch(p.source, [6], 4, transfer=TransferId("own/1/y", 0), handle="later"))
    d.agents[0].cancel("later", "it has looked at the clock")
    assert d.wait(Ended)[0].handle == "later"
    d.events().clear()
    p.agents[0].offer(offered([3], 4, transfer=T))
    assert d.wait(Ended)[0].outcome.delivered


@pytest.mark.parametrize("tp", [1, 2])
def test_what_has_come_when_the_producer_gives_up_is_delivered_where_that_is_enough(engine, options, tp):
    p, d = engine(dict(options), seed=1, tp=tp), engine(dict(options))
    wanted = fetch(p.source, [5, 6], 8, transfer=T)
    d.agents[0].fetch(replace(wanted, enough=4))
    other = TransferId("own/1/whole", 0)
    d.agents[0].fetch(replace(wanted, transfer=other, handle="whole", blocks=BlockTable.of([[7, 8]])))
    for agent in p.agents:
        for transfer in (T, other):
            agent.offer(offered([3], 4, transfer=transfer, final=False))
    half = np.concatenate([p.block(3, r) for r in range(tp)], axis=1)  # by head
    until(lambda: all(np.array_equal(d.block(block), half) for block in (5, 7)))
    for agent in p.agents:
        for transfer in (T, other):
            agent.revoke(transfer, 1, "its client has left", gone=True, kept=True)
    ends = {end.handle: end for end in d.wait(Ended, count=2)}
    assert ends["req"].outcome.delivered and ends["req"].short == 4
    assert ends["whole"].outcome.kind is FailureKind.WITHDRAWN and "its client has left" in str(ends["whole"].outcome)
    for r in range(tp):
        p.wait(Released, rank=r, count=2)
    d.wait(Released, count=2)


def test_what_nobody_is_reading_when_it_is_given_up_ends_at_once(engine):
    p, d = engine({}, seed=1), engine({})
    p.agents[0].offer(offered([3], 4, transfer=T, final=False))
    p.agents[0].revoke(T, 1, "its client has left", gone=True, kept=True)
    assert p.wait(Ended)[0].outcome.kind is FailureKind.WITHDRAWN
    p.wait(Released)
    d.agents[0].fetch(replace(fetch(p.source, [5, 6], 8, transfer=T), enough=4))
    assert d.wait(Ended)[0].outcome.kind is FailureKind.WITHDRAWN


def test_cancel_on_either_side(engine, options):
    p, d = engine(dict(options), seed=1), engine(dict(options))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    d.agents[0].cancel("req", "client left")
    assert d.wait(Ended)[0].outcome.kind is FailureKind.CANCELLED
    d.wait(Released)
    other = TransferId("own/1/y", 0)
    p.agents[0].offer(offered([3], 4, transfer=other))
    p.agents[0].revoke(other, 1, "request aborted", gone=True)
    assert p.wait(Ended)[0].outcome.kind is FailureKind.WITHDRAWN
    p.wait(Released)
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=other, handle="late"))
    end = d.wait(Ended, count=2)[1]
    assert end.outcome.kind is FailureKind.WITHDRAWN and "aborted" in end.outcome.failure.detail


@pytest.mark.parametrize(
    "how", [{"verbs": ["write"]}, {"ucx": {"TLS": "tcp", "NET_DEVICES": "lo"}}], ids=["asked", "tcp"]
)
def test_nixl_that_only_writes_goes_through_slots_that_are_lent(engine, how):
    """Nothing but closing all of NIXL ends a write that is on its way, so none goes into blocks of the cache."""
    require("nixl")
    options = {"backend": "nixl", **how}
    p, d = engine(dict(options), seed=1, blocks=64), engine(dict(options), blocks=64)
    p.agents[0].offer(offered(list(range(64)), 250, transfer=T))
    d.agents[0].fetch(fetch(p.source, list(range(63, -1, -1)), 250, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    assert all(np.array_equal(d.block(63 - i), p.block(i)) for i in range(62))
    assert p.agents[0].stats().staged == d.agents[0].stats().staged == 1


@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_preempted_while_moving(engine, verbs):
    """The producer's engine takes its blocks away under a part on its way, and computes them anew: the consumer waits,
    whether it learns of it first from the producer or from its back end."""
    way = {"verbs": verbs, "delay_s": 0.02}
    p, d = engine(dict(way), seed=1, blocks=64), engine(dict(way), blocks=64)
    for i in range(12):
        t, mine, theirs = TransferId("own/1/again", i), [2 * i, 2 * i + 1], [2 * i + 1, 2 * i]
        d.agents[0].fetch(fetch(p.source, mine, 8, transfer=t, handle=str(i)))
        p.agents[0].offer(offered(theirs[:1], 4, transfer=t, final=False))
        time.sleep(0.002 * i)
        p.agents[0].revoke(t, 1, "preempted", gone=False)
        p.agents[0].offer(offered(theirs, 8, transfer=t, generation=2))
    ends = d.wait(Ended, count=12)
    assert all(e.outcome.delivered for e in ends), ends
    for i in range(12):
        assert np.array_equal(d.block(2 * i), p.block(2 * i + 1)) and np.array_equal(d.block(2 * i + 1), p.block(2 * i))


def test_many_transfers_at_once(engine, options):
    p, d = (engine(dict(options), seed=seed, blocks=256, transfer_timeout=30.0) for seed in (1, None))
    n = 100
    for i in range(n):
        t = TransferId("own/1/many", i)
        p.agents[0].offer(offered([2 * i, 2 * i + 1], 8, transfer=t))
        d.agents[0].fetch(fetch(p.source, [255 - 2 * i, 254 - 2 * i], 8, transfer=t, handle=str(i)))
    assert [e for e in d.wait(Ended, count=n, timeout=40.0) if not e.outcome.delivered] == []
    d.wait(Released, count=n)
    p.wait(Released, count=n)
    for i in range(n):
        assert np.array_equal(d.block(255 - 2 * i), p.block(2 * i))
