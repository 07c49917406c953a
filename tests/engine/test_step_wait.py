"""An engine that has nothing to do but to wait for loads waits for them within a step, until a load ends or somebody comes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.engine import BlockPins, EngineQueue, Prefix, Report, SchedulerSide
from kvxfer.engine.loads import TOGETHER_S
from kvxfer.engine.side_channel import RankResult
from kvxfer.engine.step_wait import ASYNC_S, LOOK_S, LOOKS, STEP_S, StepWait
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.values import Stages
from kvxfer.schedule import LoadState
from kvxfer.values import BlockTable, Group, Rank
from tests.engine.direct import Switchboard
from tests.engine.small import FACTS, Lending, ended
from tests.schedule.ends import Loading

SOURCE, RANK, TOKENS, LONG_S = Source("127.0.0.1", 1, 1), Rank(), 8, 1.0
MOVING = LoadState.AHEAD, LoadState.MOVING


@given(st.lists(st.tuples(st.sampled_from(LoadState), st.booleans()), max_size=6), st.integers(0, 3), st.booleans())
def test_an_engine_is_alone_if_all_its_requests_wait_for_loads_and_nobody_comes(
    loads: list[tuple[LoadState, bool]], others: int, arriving: bool
) -> None:
    working: list[Any] = [SimpleNamespace(state=state, over=over) for state, over in loads]
    schedule: Any = SimpleNamespace(working=dict(enumerate(working)))
    wait = StepWait(schedule)
    assert not wait.free and wait.worth(mock.Mock()) == 0, "its requests are not known"
    assert wait.wait(mock.Mock(return_value=False), mock.Mock(side_effect=AssertionError), expected=0.0) == 0
    unfinished = others + sum(not over for _, over in loads)
    wait.queue = EngineQueue(lambda: unfinished, lambda: arriving)
    waits = all(state in MOVING for state, over in loads if not over)
    assert wait.free == (waits and not others and not arriving)
    for load in (x for x in working if not x.over):
        run = others + sum(x.state not in MOVING for x in working if x is not load and not x.over)
        assert wait.worth(load) == min(ASYNC_S, STEP_S / max(1, run)), "what it saves, shared by those that could run"


class Consumer:
    """The scheduler side of an engine with a side channel and a pool that lends; its only worker is played.

    requests, arriving: what the engine says of its requests. came: what a worker says while it is waited for, look by look.
    """

    def __init__(self) -> None:
        self.requests, self.arriving, self.came = 0, False, list[RankResult]()
        self.looks = 0
        self.board = Switchboard(waited=self._waited)
        with mock.patch("kvxfer.engine.dispatch.SideChannel", self.board.scheduler):
            pins, queue = BlockPins(16, Lending(24)), EngineQueue(lambda: self.requests, lambda: self.arriving)
            self.side = SchedulerSide(Config(), "d", (Group(4),), 1, FACTS, pins=pins, queue=queue)
        worker = self.board.worker(lambda direct: None, list)
        self.side.listen_to({RANK: worker.address})
        self.side.step()  # says the facts
        self.until = 0  # the look at which what has come is said

    def _waited(self) -> None:
        self.looks += 1
        if self.looks == self.until:
            self.board.late += self.came
            self.came = []

    def load(self, name: str) -> None:
        self.requests += 1
        assert self.side.load(name, TransferId(f"own/{name}", 0), b"digest", SOURCE, TOKENS, offered=True)
        self.side.prefetch(name, 0)

    def knows_a_long_one(self) -> None:
        """A load from the same engine has taken longer than a step may wait."""
        self.side.loads.paces.delivered(SOURCE, TOKENS, LONG_S)

    def waits(self, name: str) -> list[float]:
        """For how long it waits, look by look, as the engine asks for a request's tokens."""
        self.board.waits.clear()
        self.side.loadable(name, 0)
        return [wait for wait in self.board.waits if wait]

    def moves(self, name: str, first: int) -> None:
        """It is given blocks of its own, and loads into them."""
        assert self.side.loadable(name, 0) == TOKENS
        self.side.allocated(name, BlockTable.of([[first, first + 1]]), TOKENS)


def result(name: str, number: int, failure: Failure | None = None) -> RankResult:
    return RankResult(name, RANK, number, 1, failure, failure is None, Stages(1.0, 2.0))


@pytest.fixture
def d() -> Iterator[Consumer]:
    made = Consumer()
    yield made
    made.side.close()


def test_a_load_of_any_length_is_taken_within_the_step(d: Consumer) -> None:
    d.knows_a_long_one()
    d.load("a")
    d.came, d.until = [result("a", 0)], 7
    assert d.side.loadable("a", 0) == TOKENS and d.side.is_prefetched("a")
    assert d.looks == 7 and set(filter(None, d.board.waits)) == {LOOK_S}


@pytest.mark.parametrize(
    ("run", "copy_s", "sync"), [(1, 0.001, True), (1, 0.004, False), (9, 0.001, True), (20, 0.001, False)]
)
def test_beside_requests_that_compute_a_long_load_is_if_its_copy_costs_them_less_than_it_saves(
    d: Consumer, monkeypatch: pytest.MonkeyPatch, run: int, copy_s: float, sync: bool
) -> None:
    now = clock.now()
    monkeypatch.setattr(clock, "now", lambda: now)
    d.knows_a_long_one()
    d.side.loads.prefetches._copying.took(TOKENS, copy_s)
    d.requests = run
    d.load("a")
    assert d.waits("a") == [], "nobody waits for it"
    assert Loading(d.side.loads.schedule).of("a").is_sync == sync  # type: ignore[union-attr]


def test_those_that_could_run_wait_for_loads_that_come_one_after_the_other(d: Consumer) -> None:
    """Each of them would else take a step more. What they may lose is theirs again with every load that comes, and in every step."""
    d.requests = 1  # it computes
    for name in "abcde":
        d.load(name)
    d.came, d.until = [result("a", 0)], 3
    assert len(d.waits("a")) == 3 and d.side.is_prefetched("a")
    d.came, d.until = [result("b", 1), result("c", 2)], d.looks + 2
    assert len(d.waits("b")) == 2 and d.waits("c") == []
    assert len(d.waits("d")) == 3, "four could run, and have lost 12 ms"
    assert d.waits("e") == [], "in this step"
    d.side.step()
    assert d.waits("d") == [], "it has been waited for once"
    d.came, d.until = [result("e", 4)], d.looks + 2
    assert len(d.waits("e")) == 2


@pytest.mark.parametrize(("ahead", "looks"), [(1, 0), (2, 2), (3, 2)])
def test_those_that_could_run_do_not_wait_if_they_lose_more_than_the_loads_save(
    d: Consumer, ahead: int, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five lose 20 ms by a load of 4 ms. Each of those that are ahead saves 10."""
    monkeypatch.setattr(clock, "now", lambda: 0.0)
    d.side.loads.paces.delivered(SOURCE, TOKENS, 0.004)
    d.requests = 5
    for name in "abc"[:ahead]:
        d.load(name)
    assert d.waits("a").count(LOOK_S) == looks


def test_whoever_comes_ends_the_wait_and_a_long_load_has_no_other(d: Consumer) -> None:
    d.knows_a_long_one()
    d.load("a")
    assert len(d.waits("a")) == LOOKS, "and then it makes a step"
    assert len(d.waits("a")) == LOOKS, "in the next one, too"
    d.arriving = True
    assert d.waits("a") == []
    d.arriving, d.requests = False, 2
    assert d.waits("a") == [], "it is there, and is to be computed"


def test_another_engine_that_asks_ends_the_wait(d: Consumer) -> None:
    d.knows_a_long_one()
    d.load("a")
    with mock.patch.object(d.side.directory, "inquiries", ["a question"]):
        assert d.waits("a") == []
    assert len(d.waits("a")) == LOOKS


def test_beside_the_steps_a_load_that_ends_ends_the_wait(d: Consumer) -> None:
    d.side.loads.paces.failed(SOURCE)
    d.load("a")
    d.moves("a", 1)
    d.side.step()
    d.came, d.until = [result("a", 0)], 5
    assert d.side.loads.wait_alone() and d.looks == 5
    assert d.side.report(Report()).loaded == {"a"}


def test_a_load_that_fails_ends_the_wait_and_steps_go_on_until_one_has_reported_it(d: Consumer) -> None:
    d.side.loads.paces.failed(SOURCE)
    d.load("a")
    d.moves("a", 1)
    d.side.step()
    why = Failure(FailureKind.REVOKED, "it was taken away")
    d.came, d.until = [result("a", 0, why)], 5
    assert d.side.loads.wait_alone() and d.looks == 5
    assert not d.side.report(Report()).failed
    d.side.step()
    assert d.side.loads.wait_alone() and d.looks == 5
    assert d.side.report(ended("a", RANK, failure=why)).failed == {"a": why}
    assert not d.side.loads.wait_alone(), "there is nothing to wait for"


def test_fetches_that_may_not_have_gone_ahead_are_not_kept_from_workers(d: Consumer) -> None:
    d.side.loads.paces.failed(SOURCE)
    d.load("a")
    d.board.deaf = True
    d.moves("a", 1)
    d.side.step()
    assert not d.side.loads.wait_alone()
    d.side.step()
    assert d.side.loads.wait_alone()


def test_what_comes_together_is_sent_together(d: Consumer) -> None:
    send = mock.Mock(wraps=d.side._dispatch.channel.send)

    def sent() -> list[int]:
        return [len(call.args[0].fetches) for call in send.call_args_list if call.args[0].fetches]

    with mock.patch.object(clock, "now", lambda: now), mock.patch.object(d.side._dispatch.channel, "send", send):
        now, d.arriving = 1.0, True
        for name in "abc":
            d.load(name)
        assert sent() == [1], "the first does not wait for the last"
        now += TOGETHER_S
        d.load("d")
        assert sent() == [1, 3]
        d.load("e")
        d.arriving = False
        d.load("f")
        assert sent() == [1, 3, 2], "nothing more comes"
        d.arriving = True
        d.load("g")
        d.side.loadable("g", 0)
        assert sent() == [1, 3, 2, 1], "it is sent before it is waited for"


class Asking:
    """An engine that asks another for prefixes. The other answers when its thread steps; ``requests`` is what the first says it has."""

    def __init__(self) -> None:
        self.requests, config = 1, Config.from_mapping({"ask_timeout": 60.0, "ask_tokens": 1})
        queue = EngineQueue(lambda: self.requests, lambda: False)
        self.side = SchedulerSide(config, "p", (Group(4),), 1, FACTS, queue=queue)
        self.other = SchedulerSide(config, "d", (Group(4),), 1, FACTS)
        self.prefix = Prefix(list(range(64)), model="m")

    def ask(self, name: str) -> None:
        assert self.side.ask(name, self.prefix, [self.other.source], tokens=64, computed=0, kind="test")

    def close(self) -> None:
        self.side.close(), self.other.close()


@pytest.fixture
def p() -> Iterator[Asking]:
    made = Asking()
    yield made
    made.close()


def test_an_answer_is_waited_for_within_the_step(p: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has nothing else to do makes no empty steps until then."""
    monkeypatch.setattr("kvxfer.engine.step_wait.LOOKS", 1_000_000)  # on a busy machine an answer takes a while
    p.other.wake = p.other.step  # at once, on the directory's thread
    p.ask("a")
    assert p.side.loadable("a", 0) == 0, "the answer, which is nothing, has come within the call"
    assert p.side.asked["test"].unanswered == 0


def test_an_answer_is_not_waited_for_while_there_is_more_to_do(p: Asking) -> None:
    p.requests = 2
    p.ask("a")
    slept = mock.Mock()
    with mock.patch.object(clock, "wait", slept):
        assert p.side.loadable("a", 0) is None
    assert not slept.called, "it asks, and goes on"
