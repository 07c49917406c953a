"""A load that fails before any producer rank was asked is declined, so that the producer need not wait for its lease.

Who has asked is counted by the ranks that it asked, and declining it as well would count it twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from kvxfer import BlockTable, Config, Ended, FailureKind, Group, Rank, Ticket, TransferId
from kvxfer.engine import BlockPins, Report, SchedulerSide
from kvxfer.engine.side_channel import RankResult
from kvxfer.failures import Failure
from kvxfer.identity import Source
from kvxfer.protocol.messages import Decline, Named
from kvxfer.protocol.values import Stages
from kvxfer.testing.engine import FACTS, PagedEngine
from kvxfer.testing.fake import Network
from tests.control.conftest import engine, offered, until
from tests.engine import small
from tests.engine.direct import Switchboard
from tests.engine.small import Lending

__all__ = ["engine"]

OTHER = {"model": "other"}
T, D, SOURCE = TransferId("own/1", 0), b"digest", Source("127.0.0.1", 1, 1)
WHY = Failure(FailureKind.PEER_UNREACHABLE, "nobody answers")
A, B = Rank(0, 0), Rank(0, 1)
ASKED, UNASKED = Stages(1.0, 2.0), Stages(1.0)


# --- two ranks, played ------------------------------------------------------------------------------------------------


class Two:
    """The scheduler side of an engine of two ranks that has begun to load, and what it declines."""

    def __init__(self) -> None:
        self.side = SchedulerSide(Config(), "d", (Group(4),), 2, FACTS)
        self.declined = declines(self.side)
        assert self.side.load("r", T, D, SOURCE, 8)
        self.side.allocated("r", BlockTable.of([[1, 2]]), self.side.loadable("r", 0) or 0)
        self.side.step()

    def hear(self, *reports: Report) -> None:
        for report in reports:
            self.side.report(report)
        self.side.step()


@pytest.fixture
def two() -> Iterator[Two]:
    made = Two()
    yield made
    made.side.close()


def declines(side: SchedulerSide) -> list[Named]:
    """What it declines from now on, while the rest of what it tells goes its way."""
    found: list[Named] = []
    tell = side.directory.tell

    def listen(source: Source, message: Any) -> None:
        if isinstance(message, Decline):
            found.extend(message.transfers)
        tell(source, message)

    side.directory.tell = listen  # type: ignore[method-assign]
    return found


def ended(rank: Rank, stages: Stages, failure: Failure | None = WHY, **more: Any) -> Report:
    return small.ended("r", rank, stages=stages, failure=failure, **more)


MERGED: dict[str, Callable[[Report, Report], tuple[Report, ...]]] = {
    "in one report": lambda one, two: (one.merge(two),),
    "one after the other": lambda one, two: (one, two),
}
merged = pytest.mark.parametrize("merge", MERGED.values(), ids=MERGED.keys())


@merged
@pytest.mark.parametrize("second", [WHY, None], ids=["failed", "had nothing to fetch"])
def test_it_is_declined_once_where_no_rank_has_asked(two: Two, merge: Any, second: Failure | None) -> None:
    two.hear(*merge(ended(A, UNASKED), ended(B, UNASKED, second)))
    assert two.declined == [Named(T, D)]
    two.side.finished("r", BlockTable.of([[1, 2]]), False)
    two.hear(Report())
    assert two.declined == [Named(T, D)] and len(two.side) == 0


@merged
@pytest.mark.parametrize("said", [ASKED, Stages()], ids=["asked", "does not know"])
@pytest.mark.parametrize("failure", [WHY, Failure(FailureKind.INCOMPATIBLE, "the models differ")], ids=lambda f: f.kind)
def test_it_is_not_unless_all_ranks_say_so(two: Two, merge: Any, said: Stages, failure: Failure) -> None:
    two.hear(*merge(ended(A, UNASKED, failure), ended(B, said, failure)))
    two.side.finished("r", BlockTable.of([[1, 2]]), False)
    two.hear(Report())
    assert not two.declined and len(two.side) == 0


@pytest.mark.parametrize("quiet", [True, False])
def test_what_has_failed_on_one_rank_is_cancelled_on_the_others(two: Two, quiet: bool) -> None:
    assert not two.side.report(ended(A, ASKED, quiet=quiet)).failed, "the other rank may still write"
    assert [cancel.number for cancel in two.side.step().commands.cancels] == [0]
    two.side.report(ended(A, ASKED))
    assert two.side.report(ended(B, ASKED)).failed == {"r": WHY}
    assert not two.side.step().commands.cancels


def test_it_is_not_when_the_engine_says_that_it_is_over(two: Two) -> None:
    two.hear(ended(A, UNASKED))
    two.side.confirm_load_ended("r")
    two.side.finished("r", BlockTable.of([[1, 2]]), False)
    two.hear(Report())
    assert not two.declined and len(two.side) == 0


@pytest.mark.parametrize("other", [UNASKED, ASKED], ids=["unasked", "asked"])
def test_so_is_a_prefetch(other: Stages) -> None:
    board = Switchboard()
    with mock.patch("kvxfer.engine.dispatch.SideChannel", board.scheduler):
        side = SchedulerSide(Config(), "d", (Group(4),), 2, FACTS, pins=BlockPins(8, Lending(8)))
    declined = declines(side)
    side.listen_to({rank: board.worker(lambda _: None, list).address for rank in (A, B)})
    side.step()  # says the facts
    assert side.load("r", T, D, SOURCE, 8, offered=True) and side.loadable("r", 0) is None
    assert not side.is_prefetched("s") and side.is_prefetched("r"), "it is a prefetch"
    results = {rank: RankResult("r", rank, 0, None, WHY, True, stages) for rank, stages in ((A, UNASKED), (B, other))}
    side.report(Report(results={(0, rank): result for rank, result in results.items()}))
    assert side.loadable("r", 0) == 0
    side.allocated("r", BlockTable.of([[1, 2]]), 0)
    side.step()
    assert declined == ([Named(T, D)] if other is UNASKED else [])
    side.finished("r", BlockTable.of([[1, 2]]), True)
    side.step()
    assert len(declined) == (other is UNASKED) and len(side) == 0
    side.close()


@pytest.mark.parametrize(("computed", "external", "there"), [(0, 8, [1, 2]), (0, 3, [1, 2]), (4, 4, [-1, 2])])
def test_a_prefetch_is_copied_from_the_local_tokens_on(computed: int, external: int, there: list[int]) -> None:
    """However many of the others the engine counts on."""
    board = Switchboard()
    with mock.patch("kvxfer.engine.dispatch.SideChannel", board.scheduler):
        side = SchedulerSide(Config(), "d", (Group(4),), 1, FACTS, pins=BlockPins(8, Lending(8)))
    side.listen_to({A: board.worker(lambda _: None, list).address})
    side.step()
    assert side.load("r", T, D, SOURCE, 8, offered=True) and side.loadable("r", 0) is None
    side.report(Report(results={(0, A): RankResult("r", A, 0, 1, None, True, ASKED)}))
    assert side.loadable("r", computed) == 8 - computed
    side.allocated("r", BlockTable.of([[1, 2]]), external)
    (copy,) = side.step().copies
    assert copy.dst[0].tolist() == there
    side.close()


# --- real agents ------------------------------------------------------------------------------------------------------


@pytest.fixture
def make() -> Iterator[Callable[..., PagedEngine]]:
    made: list[PagedEngine] = []

    def one(**more: Any) -> PagedEngine:
        facts = more.pop("facts", FACTS)
        made.append(PagedEngine({"transfer_timeout": 60.0, **more}, facts=facts))
        made[-1].step()
        return made[-1]

    yield one
    for each in made:
        each.close()


def deaf(p: PagedEngine) -> None:
    """Its directory still names other facts than its agent, which refuses the hello."""
    p.worker.agent.identify(OTHER)


REFUSALS: dict[str, tuple[dict[str, Any], Callable[[PagedEngine], object], FailureKind]] = {
    "other facts": ({"facts": OTHER}, lambda p: None, FailureKind.INCOMPATIBLE),
    "a hello refused": ({}, deaf, FailureKind.INCOMPATIBLE),
    "no back end in common": ({"backend": "tcp"}, lambda p: None, FailureKind.INCOMPATIBLE),
    "an endpoint refused": ({"backend_options": {"network": Network()}}, lambda p: None, FailureKind.BACKEND_FAILED),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_the_producer_has_its_blocks_again_at_once(make: Callable[..., PagedEngine], case: str) -> None:
    config, spoil, kind = REFUSALS[case]
    p, d = make(lease=600.0), make(**config)
    ticket = p.offer("x", 8)
    spoil(p)
    d.load("x", ticket, 8)
    assert d.until("x").failed["x"].kind is kind
    d.step()  # tells it
    assert "x" in p.until("x").free


def test_an_offer_for_three_engines_needs_three(make: Callable[..., PagedEngine]) -> None:
    p, good, *others = make(), make(), make(facts=OTHER), make(facts=OTHER)
    ticket = p.ask("x", 8)
    for sample in ("y", "z"):
        assert p.scheduler.offer(sample, ticket.transfer, ticket.digest, 8)
    p.run("x", ticket.digest, 0, 8)
    p.step()
    for request in ("x", "y", "z"):
        p.finish(request)
    for d in others:
        d.load("x", ticket, 8)
        assert d.until("x").failed["x"].kind is FailureKind.INCOMPATIBLE
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            assert not p.step().free and not d.step().failed, "one engine has still to come"
    good.load("x", ticket, 8)
    assert good.until("x").loaded
    good.verify()
    assert "x" in p.until("x").free


class Reader(PagedEngine):
    """Reads from producers of several ranks."""

    def fetch(self, name: str, source: Source) -> Failure | None:
        self.load(name, Ticket(TransferId(name, 0), b"d", source), 8, [3, 4])
        return self.until(name).failed.get(name)


def test_who_was_asked_by_one_rank_counts_it_and_nobody_else_does(engine: Any) -> None:  # noqa: F811
    """The other rank, which has not heard of it, keeps its blocks for the lease."""
    p, d = engine({}, tp=2, seed=1, facts=FACTS, lease=60.0), Reader()
    d.step()
    declined = declines(d.scheduler)
    for name in "xy":
        for agent in p.agents:
            agent.offer(offered([1, 2], 8, transfer=TransferId(name, 0)))
    assert d.fetch("x", p.source) is None  # so that there are links
    assert all(p.wait(Ended, rank)[0].outcome.delivered for rank in (0, 1))
    p.agents[1].identify(OTHER)
    until(lambda: len(d.worker.agent.links()) == 1)
    failure = d.fetch("y", p.source)
    assert failure is not None and failure.kind is FailureKind.INCOMPATIBLE
    assert p.wait(Ended, 0, 2)[1].outcome.kind is FailureKind.INCOMPATIBLE, "it was told so"
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        d.step()
    assert not declined and len([e for e in p.events(1) if isinstance(e, Ended)]) == 1
    d.close()
