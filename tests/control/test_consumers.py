"""One offer for several engines, and what goes along with it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer import ArgumentError
from kvxfer.errors import PeerError
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.values import MAX_PAYLOAD, BlockTable, Offer
from tests.control.conftest import Ended, FailureKind, Released, fetch

T = TransferId("own/1/x", 0)
FIRST = b"first token: 17"


def offer(
    consumers: int = 1, payload: bytes = b"", *, tokens: int = 11, final: bool = True, generation: int = 1
) -> Offer:
    blocks = BlockTable.of([[3, 1, 7][: -(-tokens // 4)]])
    return Offer(T, b"d", generation, tokens, blocks, final, consumers, payload)


def test_an_offer_is_kept_until_all_its_consumers_have_it(engine: Any) -> None:
    p, one, two = engine({}, seed=1), engine({}), engine({}, tp=2)
    p.agents[0].offer(offer(2))
    one.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    assert one.wait(Ended)[0].outcome.delivered
    one.wait(Released)
    assert not p.events(), "the offer is over though another engine is to have it"
    for agent in two.agents:
        agent.fetch(fetch(p.source, [4, 6, 8], 11, transfer=T, own=two.source))
    assert all(two.wait(Ended, rank)[0].outcome.delivered for rank in (0, 1))
    assert p.wait(Ended)[0].outcome.delivered
    p.wait(Released)
    halves = np.concatenate([two.block(4, 0), two.block(4, 1)], axis=1)
    assert np.array_equal(one.block(5), p.block(3)) and np.array_equal(halves, p.block(3))


def test_an_offer_is_over_once_those_who_will_come_have_it(engine: Any) -> None:
    """The engine learns only then that one of them has declined."""
    p, one = engine({}, seed=1), engine({})
    p.agents[0].offer(offer(2))
    one.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    assert one.wait(Ended)[0].outcome.delivered
    one.wait(Released)
    assert not p.events()
    p.agents[0].offer(offer(1))
    assert p.wait(Ended)[0].outcome.delivered
    p.wait(Released)


def test_what_becomes_of_one_means_nothing_for_the_others(engine: Any) -> None:
    p, gone, lost, stays = engine({}, seed=1, lease=5.0), engine({}, tp=2), engine({}), engine({})
    for agent in gone.agents:  # gives up before it is there
        agent.fetch(fetch(p.source, [5, 2, 9], 12, transfer=T, own=gone.source))
        agent.cancel("req", "its client left")
    p.agents[0].offer(offer(3, tokens=8, final=False))
    lost.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    lost.agents[0].close()
    stays.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    p.agents[0].offer(offer(3))
    assert stays.wait(Ended)[0].outcome.delivered and np.array_equal(stays.block(5), p.block(3))
    end = p.wait(Ended)[0]  # by the lease, if one was lost before the producer had heard of it
    assert end.outcome.kind in (FailureKind.CANCELLED, FailureKind.UNFETCHED)
    p.wait(Released)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("verbs", [["read"], ["write"], ["send", "recv"]], ids=str)
def test_a_payload_comes_with_the_outcome(engine: Any, verbs: list[str], ranks: int) -> None:
    p, d = engine({"verbs": verbs}, seed=1, tp=ranks), engine({"verbs": verbs})
    for agent in p.agents:
        agent.offer(offer(payload=FIRST, tokens=8, final=False))  # stays
        agent.offer(offer())
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    assert d.wait(Ended)[0].payload == FIRST
    assert all(p.wait(Ended, rank)[0].payload == b"" for rank in range(ranks))


def test_a_payload_is_of_the_generation_that_was_delivered(engine: Any) -> None:
    p, d = engine({}, seed=1), engine({})
    p.agents[0].offer(offer(payload=b"of blocks that are given up", tokens=8, final=False))
    p.agents[0].revoke(T, 1, "preempted", False)
    p.agents[0].offer(offer(generation=2))
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.delivered and end.generation == 2 and end.payload == b""


def test_a_payload_that_came_is_not_given_without_delivery(engine: Any) -> None:
    p, d = (engine({"verbs": ["read"], "corrupt": 1.0}, seed=seed, integrity="full") for seed in (1, None))
    p.agents[0].offer(offer(payload=FIRST))
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T))
    (end,) = d.wait(Ended)
    assert end.outcome.kind is FailureKind.CORRUPT and end.payload == b""


def test_a_payload_is_bounded_by_the_call_and_by_the_peer(engine: Any) -> None:
    offer(payload=bytes(MAX_PAYLOAD))
    with pytest.raises(ArgumentError, match="payload must have at most 65536 bytes"):
        offer(payload=bytes(MAX_PAYLOAD + 1))
    with pytest.raises(ArgumentError, match="consumers"):
        offer(consumers=0)
    have = m.PartReady(T, 1, 1, 0, 0, 4, True, BlockTable.of([[3]]), 0, 0)
    assert m.decode(m.encode(msgspec.structs.replace(have, payload=bytes(MAX_PAYLOAD))))
    with pytest.raises(PeerError, match="length <= 65536"):
        m.decode(m.encode(msgspec.structs.replace(have, payload=bytes(MAX_PAYLOAD + 1))))
