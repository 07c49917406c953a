"""Wrong calls of the two sides, each in the middle of honest ones: it is answered by itself, and all of those go through."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvxfer import (
    BlockTable,
    ClosedError,
    Config,
    ConfigError,
    FailureKind,
    Fetch,
    Group,
    Handle,
    KvxferError,
    Rank,
    Source,
    Ticket,
    TransferId,
    clock,
)
from kvxfer.engine import BlockPins, Report, SchedulerSide, Step, WorkerChannel, WorkerSide
from kvxfer.engine.renewals import Renewals
from kvxfer.protocol.messages import Renew
from kvxfer.schedule import FetchSchedule
from kvxfer.testing.engine import FACTS, PagedEngine, PagedMemory, until
from kvxfer.testing.fake import FakeTransport
from tests.schedule.ends import Loading

CONFIG = Config(backend="kvxfer.testing.fake:FakeTransport", transfer_timeout=20.0, lease=20.0)
DIGEST, TABLE = b"d", BlockTable.of([[14, 15]])
HONEST = 6
NAMES = itertools.count()


def engine(name: str, **functions: Any) -> PagedEngine:
    """One rank of two tokens a block."""
    return PagedEngine(CONFIG, PagedMemory(layers=1, tokens=2, heads=1, unit=8), name=name, **functions)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[PagedEngine, PagedEngine]]:
    with engine("p") as p, engine("d") as d:
        p.step(), d.step()
        yield p, d


def fresh() -> tuple[str, TransferId]:
    name = f"r{next(NAMES)}"
    return name, TransferId.mint(1, name)


def offered(s: SchedulerSide) -> str:
    request, transfer = fresh()
    assert s.offer(request, transfer, DIGEST, 4)
    return request


def loading(s: SchedulerSide) -> str:
    request, transfer = fresh()
    assert s.load(request, transfer, DIGEST, s.source, 4)
    s.loadable(request, 0)
    return request


def offer(s: SchedulerSide, **wrong: Any) -> None:
    request, transfer = fresh()
    s.offer(**{"request": request, "transfer": transfer, "digest": DIGEST, "tokens": 4, **wrong})


def load(s: SchedulerSide, **wrong: Any) -> None:
    request, transfer = fresh()
    good = {"request": request, "transfer": transfer, "digest": DIGEST, "source": s.source, "tokens": 4}
    s.load(**{**good, **wrong})


def runs(s: SchedulerSide, computed: Any = 0, scheduled: Any = 4, table: Any = TABLE) -> None:
    s.runs(offered(s), computed, scheduled, table)


def allocated(s: SchedulerSide, table: Any = TABLE, external: Any = 4) -> None:
    s.allocated(loading(s), table, external)


def ticket(s: SchedulerSide) -> Ticket:
    return Ticket(fresh()[1], DIGEST, s.source)


SCHEDULER: dict[str, tuple[Callable[[SchedulerSide], Any], str]] = {
    "a request is a number": (lambda s: offer(s, request=1), "request must be a str, not 1"),
    "offer a text": (lambda s: offer(s, transfer="x"), "transfer must be a kvxfer TransferId, not 'x'"),
    "offer tokens of text": (lambda s: offer(s, tokens="4"), "tokens must be an integer, not '4'"),
    "an answer of a number": (lambda s: offer(s, answer=5), "answer must be a str, not 5"),
    "offer, and stop or not": (lambda s: offer(s, stops=None), "stops must be True or False"),
    "load a ticket": (
        lambda s: load(s, transfer=ticket(s)),
        "transfer must be a kvxfer TransferId, not a kvxfer.ticket",
    ),
    "load a long digest": (lambda s: load(s, digest=bytes(100)), "digest must have at most 64 bytes"),
    "load from an address": (lambda s: load(s, source="h:1"), "source must be a kvxfer Source, not 'h:1'"),
    "load tokens of text": (lambda s: load(s, tokens="4"), "tokens must be an integer"),
    "load other content under one name": (
        lambda s: s.load(loading(s), TransferId.mint(1, f"r{next(NAMES) - 1}"), b"other", s.source, 4),
        "and nothing else under that name",
    ),
    "load, offered or not": (lambda s: load(s, offered=None), "offered must be True or False"),
    "enough is more than all": (lambda s: load(s, enough=1000), "enough must be at most 4, not 1000"),
    "computed is negative": (lambda s: s.loadable(loading(s), -1), "computed must be at least 0"),
    "prefetch behind nothing": (lambda s: s.prefetch(loading(s), -1), "computed must be at least 0"),
    "a list of blocks": (lambda s: allocated(s, [[1, 2]]), "table must be a kvxfer BlockTable, not a list"),
    "count on too much": (lambda s: allocated(s, external=5), "expects 5 tokens where 4 can be had"),
    "count on what is not loaded": (
        lambda s: s.allocated("x", TABLE, 4),
        "request x expects 4 tokens, and does not load",
    ),
    "load into too few blocks": (lambda s: allocated(s, BlockTable.of([[1]])), "no blocks for tokens 0 to 4"),
    "load into two groups": (
        lambda s: allocated(s, BlockTable.of([[1, 2], [3]])),
        "one row for each .* 1 groups, not 2",
    ),
    "runs in a list": (lambda s: runs(s, table=[[1, 2]]), "table must be a kvxfer BlockTable"),
    "runs in too few blocks": (
        lambda s: runs(s, table=BlockTable.of([[1]])),
        r"table\[0\] must list 2 blocks of 2 tokens",
    ),
    "runs with a hole": (
        lambda s: runs(s, table=BlockTable.of([[1, -1]])),
        r"table\[0\] must have a block at position 1",
    ),
    "runs in one block twice": (lambda s: runs(s, table=BlockTable.of([[1, 1]])), "each block once, and block 1"),
    "runs beyond the cache": (lambda s: runs(s, table=BlockTable.of([[1, 99]])), r"table\[0\] must be ids below 16"),
    "ends in a list": (lambda s: s.finished(offered(s), [[1, 2]], True), "table must be a kvxfer BlockTable"),  # type: ignore[arg-type]
    "ends, and what there is is good or not": (
        lambda s: s.finished(offered(s), TABLE, False, good=None),  # type: ignore[arg-type]
        "good must be True or False",
    ),
    "stands still or not": (lambda s: s.stands_still(None), "whether must be True or False"),  # type: ignore[arg-type]
    "listen to a number": (lambda s: s.listen_to(5), "channels must be a mapping"),  # type: ignore[arg-type]
    "listen to a rank's number": (
        lambda s: s.listen_to({Rank(): 2}),
        r"channels\[.*\] must be a kvxfer ChannelAddress",
    ),  # type: ignore[dict-item]
    "reports of nothing": (lambda s: Report().merge(None), "later must be a kvxfer Report, not None"),  # type: ignore[arg-type]
    "identify as nothing": (lambda s: s.identify(None), "facts must be a mapping"),  # type: ignore[arg-type]
    "withdraw for no reason": (lambda s: s.withdraw_all(None), "reason must be a str"),  # type: ignore[arg-type]
    "tell a text": (lambda s: s.directory.tell(s.source, "x"), "message must be a notice, not 'x'"),  # type: ignore[arg-type]
    "publish nothing": (lambda s: s.directory.publish(None), "ranks must be a tuple"),  # type: ignore[arg-type]
}

WORKER: dict[str, tuple[Callable[[WorkerSide], Any], str]] = {
    "begin nothing": (lambda w: w.begin(None), "step must be a kvxfer Step, not None"),  # type: ignore[arg-type]
    "a layer by its number": (lambda w: w.layer_done(Step(), 0), "layer must be a str, not 0"),  # type: ignore[arg-type]
    "resume with nothing": (lambda w: w.resume(None), "agent must be a kvxfer Agent, not None"),  # type: ignore[arg-type]
    "no agent": (lambda w: WorkerSide(None), "agent must be a kvxfer Agent"),  # type: ignore[arg-type]
    "a second worker side": (lambda w: WorkerSide(w.agent), "agent must not have a worker side yet"),
    "a negative quarantine": (lambda w: WorkerSide(w.agent, quarantine=-1), "quarantine must be at least 0"),
    "copies by a number": (lambda w: WorkerSide(w.agent, copy=5), "copy must be a function or None"),  # type: ignore[arg-type]
    "a channel of a number": (lambda w: WorkerSide(w.agent, channel=5), "channel must be a function or None"),  # type: ignore[arg-type]
}

MADE: dict[str, tuple[Callable[[], Any], str]] = {
    "no configuration": (lambda: made(config=None), "config must be a kvxfer Config"),
    "a name of a number": (lambda: made(engine=1), "engine must be a str"),
    "one group": (lambda: made(groups=Group(4)), "groups must be a tuple of Group, not a kvxfer.values.Group"),
    "no groups": (lambda: made(groups=[]), "groups must be at least 1"),
    "no ranks": (lambda: made(ranks=0), "ranks must be at least 1"),
    "no facts": (lambda: made(facts=None), "facts must be a mapping"),
    "pins of a number": (lambda: made(pins=4), "pins must be a kvxfer BlockPins"),
    "woken by a number": (lambda: made(wake=5), "wake must be a function or None, not 5"),
    "a negative limit": (lambda: BlockPins(-1), "limit must be at least 0"),
    "no pool": (lambda: BlockPins(4, object()), "pool must be a kvxfer BlockPool, not a object"),  # type: ignore[arg-type]
}


def made(**wrong: Any) -> SchedulerSide:
    good = {"config": CONFIG, "engine": "e", "groups": (Group(4),), "ranks": 1, "facts": FACTS}
    return SchedulerSide(**{**good, **wrong})


@pytest.mark.parametrize("wrong", MADE)
def test_what_cannot_be_made_says_why(wrong: str) -> None:
    call, told = MADE[wrong]
    with pytest.raises(KvxferError, match=told):
        call()


def honest(engines: tuple[PagedEngine, PagedEngine], amid: Callable[[PagedEngine, PagedEngine], None]) -> None:
    """Six transfers, in the middle of which both engines do something wrong; all six must come."""
    p, d = engines
    requests = [fresh() for _ in range(HONEST)]
    tables = [BlockTable.of([[2 * i, 2 * i + 1]]) for i in range(HONEST)]
    used = list(range(2 * HONEST))
    p.memory.write(used, np.random.default_rng(len(requests[0][0])).integers(1, 255, (1, 2 * HONEST, 2, 1, 8)))
    for i, (request, transfer) in enumerate(requests):
        assert p.scheduler.offer(request, transfer, DIGEST, 4)
        if i == HONEST // 2:
            amid(p, d)
        p.scheduler.runs(request, 0, 4, tables[i])
    p.step()
    for i, (request, _) in enumerate(requests):
        told = p.scheduler.ticket(request)
        assert told is not None
        assert d.scheduler.load(request, told.transfer, told.digest, told.source, 4)
        if i == HONEST // 2:
            amid(d, p)
        assert d.scheduler.loadable(request, 0) == 4
        d.scheduler.allocated(request, tables[i], 4)
    names = {request for request, _ in requests}
    until(lambda: (d.step(), p.step()) and names <= d.loaded | d.failed.keys())
    assert names <= d.loaded, d.failed
    assert np.array_equal(p.memory.read(used), d.memory.read(used))
    for request, _ in requests:
        d.scheduler.finished(request, BlockTable.of([[]]), False)
        p.scheduler.finished(request, BlockTable.of([[]]), False)


@pytest.mark.parametrize("wrong", [*SCHEDULER, *WORKER])
def test_a_wrong_call_costs_no_other(wrong: str, engines: tuple[PagedEngine, PagedEngine]) -> None:
    def amid(one: PagedEngine, _: PagedEngine) -> None:
        with pytest.raises(KvxferError, match=told) as caught:
            call(getattr(one, side))
        assert "\n" not in str(caught.value)

    side, (call, told) = ("scheduler", SCHEDULER[wrong]) if wrong in SCHEDULER else ("worker", WORKER[wrong])
    honest(engines, amid)


def test_a_worker_that_is_told_nonsense_reports_it_and_goes_on() -> None:
    """A scheduler side that has heard of no worker yet knows no bounds, and passes it on."""
    p, d = engine("p"), engine("d")
    beyond = BlockTable.of([[15, 99]])
    name, transfer = fresh()

    def amid(one: PagedEngine, other: PagedEngine) -> None:
        if one is p:
            assert p.scheduler.offer(name, transfer, DIGEST, 4)
            p.scheduler.runs(name, 0, 4, beyond)
        else:
            assert d.scheduler.load(name, fresh()[1], DIGEST, other.scheduler.source, 4)
            d.scheduler.loadable(name, 0)
            d.scheduler.allocated(name, beyond, 4)

    honest((p, d), amid)
    assert "must be ids below 16" in str(d.failed[name])
    for each in (p, d):
        each.scheduler.finished(name, BlockTable.of([[]]), False)
    until(lambda: (p.step(), d.step()) and not len(p.scheduler) + len(d.scheduler) + len(d.worker))
    p.close()
    d.close()


@pytest.mark.parametrize("function", ["table", "before_load", "on_ended", "the producer's table"])
def test_a_function_of_the_engine_s_that_fails_costs_its_own_load_only(function: str) -> None:
    """Whatever it says: a file's name need not be text."""
    failing = iter([True])

    def called(*given: Any) -> Any:
        if next(failing, False):
            raise IndexError("not ours: /tmp/\udcff\n")
        return given[0]

    theirs, _, name = function.rpartition(" ")
    p, d = (engine(one, **({name: called} if bool(theirs) is (one == "p") else {})) for one in "pd")
    try:
        p.step(), d.step()
        requests = [fresh()[0] for _ in range(2)]
        for i, request in enumerate(requests):
            transfer, table = TransferId.mint(1, f"of-{request}"), BlockTable.of([[2 * i, 2 * i + 1]])
            p.scheduler.offer(f"of-{request}", transfer, DIGEST, 4)
            p.scheduler.runs(f"of-{request}", 0, 4, table)
            d.scheduler.load(request, transfer, DIGEST, p.scheduler.source, 4)
            d.scheduler.allocated(request, table, d.scheduler.loadable(request, 0) or 0)
        until(lambda: (p.step(), d.step()) and d.loaded | d.failed.keys() == set(requests))
        assert d.loaded == set(requests if function == "on_ended" else requests[1:])
        for failure in d.failed.values():
            assert "not ours" in str(failure) and (theirs or failure.kind is FailureKind.MISUSE)
            assert f"the engine's own '{name}' has failed" in str(failure)
    finally:
        d.close(), p.close()


def test_what_the_engine_fetches_with_the_agent_itself_costs_no_load_its_end() -> None:
    with engine("p") as p, engine("d") as d:
        p.step(), d.step()
        (request, transfer), (own, _) = fresh(), fresh()
        assert p.scheduler.offer(request, transfer, DIGEST, 4)
        p.scheduler.runs(request, 0, 4, TABLE)
        d.worker.agent.fetch(Fetch(Handle(own), fresh()[1], DIGEST, p.scheduler.source, BlockTable.of([[1, 2]]), 0, 4))
        d.worker.agent.cancel(Handle(own), "not needed")
        assert d.scheduler.load(request, transfer, DIGEST, p.scheduler.source, 4) and d.scheduler.loadable(request, 0)
        d.scheduler.allocated(request, TABLE, 4)
        until(lambda: (p.step(), d.step()) and d.loaded == {request})
        assert not d.failed


def test_what_is_dropped_without_close_is_released_and_told() -> None:
    """Its threads and descriptors go, though nobody has closed it."""

    def use() -> None:
        one = engine("dropped", channel=WorkerChannel)
        one.scheduler.wake = one.step
        assert one.scheduler.load(*fresh(), DIGEST, one.scheduler.source, 4)
        one.step()

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    others, before = set(threading.enumerate()), descriptors()
    with pytest.warns(ResourceWarning, match="dropped without being closed") as told:
        use()
        until(lambda: not gc.collect() and not set(threading.enumerate()) - others)
    assert {"a scheduler side", "an agent"} <= {str(one.message).partition(" was")[0] for one in told}
    until(lambda: descriptors() <= before)


def test_what_wakes_the_engine_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("a bug of the engine's")

    with engine("d") as d:
        d.scheduler.wake = fails
        d.scheduler.directory.wake()
        assert "the engine's 'wake' has failed" in caplog.text


def test_a_renewal_that_cannot_be_sent_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvxfer.engine.renewals.RENEWED", 2000)  # of leases this short
    told: list[Source] = []
    bad, good = Source("127.0.0.1", 1, 1), Source("127.0.0.1", 2, 1)

    def tell(source: Source, _: Renew) -> None:
        if source == bad:
            raise ValueError("cannot be sent")
        told.append(source)

    schedule = Loading(FetchSchedule([Group(2)]))
    renewals = Renewals(0.02, tell, lambda: schedule.schedule)
    for name, source in (("bad", bad), ("good", good)):
        assert schedule.arrive(name, fresh()[1], DIGEST, source, 4)
        schedule.of(name).came_at = clock.now()  # type: ignore[union-attr]
    renewals.start()
    until(lambda: len(told) >= 3)
    renewals.close()


def test_what_is_closed_takes_nothing_up() -> None:
    side = made()
    side.close()
    for call in (offer, load, lambda side: side.identify({})):
        with pytest.raises(ClosedError, match="this scheduler side has been closed"):
            call(side)


@pytest.mark.parametrize("quiet", [True, False])
def test_a_worker_side_says_as_it_is_closed_whether_its_memory_is_quiet(
    quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, start = threading.Event(), FakeTransport.start
    monkeypatch.setattr(FakeTransport, "start", lambda self, *given: (start(self, *given), begun.set()))
    options = {"verbs": ["read"], "delay_s": 5.0, "quiet": "batch" if quiet else "never"}
    config = {**msgspec.structs.asdict(CONFIG), "backend_options": options}
    with PagedEngine(config, name="p") as p, PagedEngine(config, name="d") as d:
        d.load("r", p.offer("q", 4), 4)
        until(lambda: (p.step(), d.step()) and begun.is_set())
        assert d.worker.close() is quiet


def test_an_engine_goes_on_though_its_agents_are_closed_meanwhile() -> None:
    """A signal's handler drains them amid a step, and leaves the step to the engine: an exception would cost it all requests."""
    e = engine("e")
    s, w = e.scheduler, e.worker
    try:
        request, transfer = fresh()
        assert s.offer(request, transfer, DIGEST, 8)
        s.runs(request, 0, 4, TABLE)
        e.step()
        lost, other = loading(s), loading(s)
        theirs = BlockTable.of([[4, 5]])
        s.allocated(lost, BlockTable.of([[2, 3]]), 4), s.allocated(other, theirs, 4)
        e.step()
        s.preempted(request)
        s.finished(other, theirs, False)
        s.identify({"model": "another"})
        late = loading(s)
        s.allocated(late, BlockTable.of([[6, 7]]), 4)
        last = w.collect()
        w.agent.close()
        step = s.step()
        assert step.commands.revokes and step.commands.cancels and step.commands.fetches and step.facts
        step = replace(step, renewals=(transfer,))
        w.begin(step), w.load(step), w.after_forward(step)
        update = s.report(last.merge(w.collect()))
        assert {lost, late} <= update.failed.keys()
        e.close()
        s.report(Report(descriptors={Rank(): w.agent.descriptor}))
    finally:
        e.close()


def test_an_engine_whose_trace_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would take until somebody reads
    for path, why in (
        (tmp_path / "no" / "folder", "no/folder cannot be written: No such file"),
        (tmp_path, "is not a file"),
        (pipe, "pipe is not a file"),
    ):
        with pytest.raises(ConfigError, match=f"'trace': .*{why}"):
            SchedulerSide(Config(backend=CONFIG.backend, trace=str(path)), "e", (Group(2),), 1, FACTS)
