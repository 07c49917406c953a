"""KV that is computed already is offered by one call: of the prefix cache, or of a request with what it has generated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.config import Config
from kvxfer.engine import BlockPins, Report, ScheduleError, SchedulerSide
from kvxfer.errors import ArgumentError, ClosedError
from kvxfer.identity import Source, TransferId
from kvxfer.values import BlockTable, Group, Rank
from tests.engine.small import FACTS, Pool

T, D, RANK = TransferId("own/1", 0), b"digest", Rank()
PEER = Source("127.0.0.1", 1, 1)


class Holder:
    """The scheduler side of an engine whose pool has ten blocks, of which four may be pinned for nobody's request."""

    def __init__(self, *groups: Group) -> None:
        self.pool = Pool(11)
        self.side = SchedulerSide(Config(), "p", groups or (Group(4),), 1, FACTS, pins=BlockPins(4, self.pool))
        self.side.step()

    def released(self, generation: int) -> None:
        assert not self.side.report(Report(released={T: {RANK: generation}})).free

    def over(self) -> None:
        assert not self.side.waiting and not self.pool.used() and len(self.side) == 0


@pytest.fixture
def p() -> Iterator[Holder]:
    made = Holder()
    yield made
    made.side.close()


def test_the_blocks_stay_though_the_engine_lets_go_of_them(p: Holder) -> None:
    blocks = p.pool.take(3)
    ticket = p.side.offer_computed(T, D, 7, BlockTable.of([blocks]))
    assert ticket is not None and (ticket.transfer, ticket.digest, ticket.source) == (T, D, p.side.source)
    p.pool.free(blocks)
    assert p.pool.used() == 2, "the third has none of the tokens"
    (offer,) = p.side.step().commands.offers
    assert (offer.tokens, offer.final, offer.blocks.tolist()) == (7, True, [blocks[:2]])
    assert p.side.waiting, "the engine goes on making steps, or it will not hear that they have been read"
    assert p.side.offer_computed(T, D, 7, BlockTable.of([[9, 9]])) == ticket, "it is offered already"
    p.released(offer.generation)
    p.side.step()
    p.over()


def test_nobody_can_read_it_any_more_once_it_is_withdrawn(p: Holder) -> None:
    blocks = p.pool.take(2)
    assert p.side.offer_computed(T, D, 8, BlockTable.of([blocks])) is not None
    p.pool.free(blocks)
    (offer,) = p.side.step().commands.offers
    assert not p.side.withdraw_all("other weights")
    (revoke,) = p.side.step().commands.revokes
    assert revoke.gone and p.pool.used() == 2, "a rank may be reading"
    assert p.side.offer_computed(T, D, 8, BlockTable.of([blocks])) is None
    p.released(offer.generation)
    p.over()


def test_no_more_is_held_than_may_be(p: Holder) -> None:
    blocks = p.pool.take(6)
    assert p.side.offer_computed(T, D, 12, BlockTable.of([blocks[:3]])) is not None
    other = TransferId("own/2", 0)
    assert p.side.offer_computed(other, D, 8, BlockTable.of([blocks[3:5]])) is None
    assert p.side.offer_computed(other, D, 4, BlockTable.of([blocks[3:4]])) is not None


def test_nothing_is_offered_that_nothing_keeps() -> None:
    side = SchedulerSide(Config(), "p", (Group(4),), 1, FACTS)
    try:
        assert side.offer_computed(T, D, 8, BlockTable.of([[1, 2]])) is None
        assert not side.step().commands and len(side) == 0
    finally:
        side.close()


def test_what_it_cannot_be(p: Holder) -> None:
    blocks = p.pool.take(2)
    with pytest.raises(ScheduleError, match="too few blocks"):
        p.side.offer_computed(T, D, 9, BlockTable.of([blocks]))
    with pytest.raises(ArgumentError, match="tokens"):
        p.side.offer_computed(T, D, 0, BlockTable.of([blocks]))
    with pytest.raises((ScheduleError, ArgumentError), match="groups|rows"):
        p.side.offer_computed(T, D, 8, BlockTable.of([blocks, blocks]))
    assert p.side.load("r", TransferId("own/2", 0), D, PEER, 8) and p.side.loadable("r", 0) == 8
    p.side.allocated("r", BlockTable.of([blocks]), 8)
    with pytest.raises(ScheduleError, match="still fills"):
        p.side.offer_computed(T, D, 8, BlockTable.of([blocks]))
    assert not p.side.step().commands.offers
    p.side.close()
    with pytest.raises(ClosedError):
        p.side.offer_computed(T, D, 8, BlockTable.of([blocks]))


def test_a_request_that_waits_for_blocks_goes_first(p: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.engine.standstill.STANDSTILL_S", 0.0)
    blocks = p.pool.take(2)
    assert p.side.offer_computed(T, D, 8, BlockTable.of([blocks])) is not None
    p.pool.free(blocks)
    (offer,) = p.side.step().commands.offers
    p.side.stands_still(True)
    assert [revoke.gone for revoke in p.side.step().commands.revokes] == [True]
    p.released(offer.generation)
    p.over()


def test_the_end_of_an_earlier_offer_of_the_name_frees_nothing_of_it(p: Holder) -> None:
    """A request was aborted while others were reading; then its KV is found in the cache, and offered again under the same name."""
    p.side._descriptors[RANK] = None  # type: ignore[assignment]  # others can find this engine
    first, second = p.pool.take(2), p.pool.take(2)
    assert p.side.offer("r", T, D, 8)
    p.side.runs("r", 0, 4, BlockTable.of([first]))
    (offer,) = p.side.step().commands.offers
    assert not p.side.finished("r", BlockTable.of([first]), False)
    p.pool.free(first)
    assert p.side.offer_computed(T, D, 8, BlockTable.of([second])) is not None
    p.pool.free(second)
    (later,) = p.side.step().commands.offers
    p.released(offer.generation)
    assert p.pool.used() == 2, "the second stay"
    p.released(later.generation)
    p.side.step()
    p.over()
