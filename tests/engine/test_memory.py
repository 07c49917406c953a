"""Memory is given back and taken anew while an engine runs: peers find the new memory, and nothing of the old one is touched."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvxfer import Agent, FailureKind, KvxferError, Rank, Ticket, TransferId
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


def test_another_rank_is_refused(pair: tuple[PagedEngine, PagedEngine]) -> None:
    p, _ = pair
    with pytest.raises(KvxferError, match=r"rank .*tp=0.*, not .*tp=1"):
        p.worker.resume(SimpleNamespace(cache=Cache((), (), (), Rank(tp=1))))  # type: ignore[arg-type]
