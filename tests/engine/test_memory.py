"""Memory is given back and taken anew while an engine runs: peers find the new memory, and nothing of the old one is touched."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvxfer import Agent, ArgumentError, BlockTable, FailureKind, KvxferError, Rank, Ticket, TransferId
from kvxfer.geometry import Cache
from kvxfer.testing.engine import PagedEngine, PagedMemory, until

TOKENS = 4
CONFIG = {"transfer_timeout": 4.0}


@pytest.fixture
def pair() -> Iterator[tuple[PagedEngine, PagedEngine]]:
    with PagedEngine(CONFIG) as p, PagedEngine(CONFIG) as d:
        p.step(), d.step()
        yield p, d


def move(p: PagedEngine, d: PagedEngine, name: str) -> None:
    d.load(name, p.offer(name, 8), 8)
    assert name in d.until(name).loaded
    d.verify()
    assert name in p.until(name).free


def hears_that_it_is_gone(agent: Agent) -> None:
    """Wait until an agent knows that its only peer is gone: what it asks for before that is under way, and fails."""
    until(lambda: not agent.links())


@pytest.mark.parametrize("whose", [0, 1], ids=["producer", "consumer"])
def test_an_engine_goes_on_over_other_memory(pair: tuple[PagedEngine, PagedEngine], whose: int) -> None:
    p, d = pair
    move(p, d, "before")
    e = pair[whose]
    old = e.memory
    e.worker.suspend()
    hears_that_it_is_gone(pair[1 - whose].worker.agent)
    e.memory = PagedMemory()
    e.worker.resume(*e.agents())
    e.step()
    move(p, d, "after")
    old.verify()  # nobody has written to the memory that was given back


def test_what_is_under_way_ends_and_says_so(pair: tuple[PagedEngine, PagedEngine]) -> None:
    p, d = pair
    move(p, d, "before")  # so that there is a link
    held = p.offer("held", 8)
    p.step()
    p.worker.suspend()
    hears_that_it_is_gone(d.worker.agent)
    p.worker.resume(*p.agents())
    assert "held" in p.until("held").free
    d.load("held", held, 8)
    failure = d.until("held").failed["held"]
    assert failure.kind in (FailureKind.NEVER_OFFERED, FailureKind.WITHDRAWN, FailureKind.PEER_LOST), failure
    q, ticket = "loading", Ticket(TransferId.mint(p.scheduler.source.epoch, "late"), b"late", p.scheduler.source)
    d.load(q, ticket, 8)
    d.step()
    d.worker.suspend()
    d.worker.resume(*d.agents())
    assert d.until(q).failed[q].kind is FailureKind.CANCELLED
    move(p, d, "after")


def test_wrong_numbers_and_payloads_are_refused_by_the_call(pair: tuple[PagedEngine, PagedEngine]) -> None:
    p, d = pair
    t = TransferId.mint(p.scheduler.source.epoch, "x")
    with pytest.raises(ArgumentError, match="consumers"):
        p.scheduler.offer("x", t, b"x", 4, consumers=0)
    with pytest.raises(ArgumentError, match="progress"):
        d.scheduler.load("x", t, b"x", p.scheduler.source, 4, progress=-1)
    assert not len(p.scheduler) and not len(d.scheduler)
    with pytest.raises(ArgumentError, match=r"payloads\[.*x#0\] must be bytes"):
        p.worker.after_forward(p.scheduler.step(), {t: "a text"})  # type: ignore[dict-item]
    move(p, d, "beside")


def test_a_payload_for_an_offer_that_nobody_wants_any_more_is_forgotten_with_its_request(
    pair: tuple[PagedEngine, PagedEngine],
) -> None:
    """The engine need not know that its only consumer has given up before the prompt was computed."""
    p, d = pair
    transfer = TransferId.mint(p.scheduler.source.epoch, "declined")
    assert p.scheduler.offer("r", transfer, b"r", 2 * TOKENS)
    p.scheduler.runs("r", 0, TOKENS, BlockTable.of([[1]]))
    p.step()
    assert d.scheduler.load("q", transfer, b"r", p.scheduler.source, 2 * TOKENS)
    d.scheduler.finished("q", BlockTable.of([[]]), complete=False)
    d.step()
    until(lambda: p.step() is not None and p.scheduler.ticket("r") is None)
    p.scheduler.runs("r", TOKENS, TOKENS, BlockTable.of([[1, 2]]))
    p.worker.after_forward(p.scheduler.step(), {transfer: b"its first token"})
    assert not p.scheduler.finished("r", BlockTable.of([[1, 2]]), complete=True)
    p.step()
    until(lambda: p.step() is not None and len(p.worker) == 0)


def test_another_rank_is_refused(pair: tuple[PagedEngine, PagedEngine]) -> None:
    p, _ = pair
    with pytest.raises(KvxferError, match=r"rank .*tp=0.*, not .*tp=1"):
        p.worker.resume(SimpleNamespace(cache=Cache((), (), (), Rank(tp=1))))  # type: ignore[arg-type]
