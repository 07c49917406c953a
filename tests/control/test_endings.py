"""Endings: whoever closes an agent, and when, every transfer has its outcome, and its memory is released once it is quiet.
Whatever engines and back ends raise, no thread of ours dies of it; should one die, nothing waits for it."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.control.loop import CLOSED
from kvxfer.control.revocations import RevocationView
from kvxfer.errors import ClosedError, TransportError
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import CopyPlan
from kvxfer.identity import TransferId
from kvxfer.memory.cpu import CpuSpace
from kvxfer.protocol.values import Abort, Ended, PartRef, Released
from kvxfer.testing.engine import PagedMemory
from kvxfer.testing.fake import FakeTransport
from tests.conftest import require
from tests.control.conftest import SeededEngine, fetch, meet, offered, until, works
from tests.descriptors import descriptors_kept

ROOT = Path(__file__).parent.parent.parent
FAKE = "kvxfer.testing.fake:FakeTransport"


def name(i: int | str) -> TransferId:
    return TransferId(f"own/1/{i}", 0)


class Never:
    """A fence that does not pass."""

    event = None
    asked = 0

    def passed(self) -> bool:
        self.asked += 1
        return False


def started(monkeypatch: pytest.MonkeyPatch, who: str = "") -> threading.Event:
    """Is set once a batch runs: an agent counts a part as begun before its data thread has given it to the back end."""
    begun, start = threading.Event(), FakeTransport.start

    def starting(self: FakeTransport, *args: Any) -> None:
        start(self, *args)
        if self.agent.startswith(who):
            begun.set()

    monkeypatch.setattr(FakeTransport, "start", starting)
    return begun


# --- in a process of its own -------------------------------------------------------------------------------------------


@pytest.mark.keep(4)
@pytest.mark.parametrize("backend", ["tcp", "zmq", "cma", "nixl", "ucx"])
@pytest.mark.parametrize("case", ["many", "leave", "fork"])
def test_nothing_crashes_or_hangs(case: str, backend: str) -> None:
    require(backend)
    check(case, backend)


def test_a_handler_of_signals_may_call_an_agent_amid_its_calls() -> None:
    check("signalled", "tcp")


def check(case: str, backend: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.control.ending", case, backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "fine\n" in done.stdout, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]


# --- outcomes ----------------------------------------------------------------------------------------------------------


def outcomes(agent: Agent, sort: type = Ended) -> dict[TransferId, Any]:
    """Of what the agent reports; nothing is reported twice, or released before it has ended."""
    events = agent.events()
    found = [e.transfer for e in events if isinstance(e, sort)]
    assert len(found) == len(set(found))
    for e in events:
        if isinstance(e, Released):
            assert any(isinstance(x, Ended) and x.transfer == e.transfer for x in events[: events.index(e)])
    return {e.transfer: e for e in events if isinstance(e, sort)}


WAYS = {
    "read": {"verbs": ["read"]},
    "write": {"verbs": ["write"]},
    "sendrecv": {"verbs": ["send", "recv"]},
    "staged read": {"verbs": ["read"], "gathers": False},
    "staged write": {"verbs": ["write"], "gathers": False},
    "closing the peer": {"verbs": ["write"], "quiet": "peer_close"},
    "closing the back end": {"verbs": ["read"], "quiet": "backend_reset"},
    "getting quiet later": {"verbs": ["read"], "quiet": "later"},
    "zmq": {"backend": "zmq"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("integrity", ["off", "full"])
def test_all_that_is_in_hand_ends(engine: Callable[..., SeededEngine], way: str, integrity: str) -> None:
    """At any stage: nobody there yet, half done, moving, whole."""
    options = dict(WAYS[way])
    if "backend" not in options:
        options["delay_s"] = 0.05
    p, d = engine(dict(options), seed=1, integrity=integrity), engine(dict(options), integrity=integrity)
    agent, other = d.agents[0], p.agents[0]
    for i in range(6):
        agent.fetch(fetch(p.source, [2 * i, 2 * i + 1], 8, transfer=name(i), handle=str(i)))
        if i % 3:
            other.offer(offered([2 * i, 2 * i + 1][: i % 3], 4 * (i % 3), transfer=name(i), final=i % 3 == 2))
    agent.fetch(fetch(p.source, [12], 4, transfer=name("nowhere"), handle="nowhere"))
    other.offer(offered([13], 4, transfer=name("unasked")))
    other.offer(offered([14], 4, transfer=name("behind its fence")), after=Never())
    time.sleep(0.08)
    assert agent.close()
    events = agent.events()
    for sort in (Ended, Released):
        found = [e.transfer for e in events if isinstance(e, sort)]
        assert sorted(found, key=str) == sorted([*(name(i) for i in range(6)), name("nowhere")], key=str)
    for e in events:
        if isinstance(e, Ended) and not e.outcome.delivered:
            assert e.outcome.kind is FailureKind.CANCELLED
    assert other.close()
    held = [e for e in other.events() if isinstance(e, Released)]
    assert len(held) == len({e.transfer for e in held}) == 6
    assert agent.stats().fetches == other.stats().offers == 0


def test_peers_are_told_at_once(engine: Callable[..., SeededEngine]) -> None:
    """They need not find out by silence."""
    p, d = (
        engine({}, seed=1, peer_timeout=60.0, transfer_timeout=60.0, lease=60.0),
        engine({}, peer_timeout=60.0, transfer_timeout=60.0),
    )
    d.agents[0].fetch(fetch(p.source, [1, 2], 8, transfer=name(0)))
    p.agents[0].offer(offered([1], 4, transfer=name(0), final=False))
    until(lambda: d.block(1).any())
    p.agents[0].close()
    (end,) = d.wait(Ended)
    assert end.outcome.kind is FailureKind.PEER_LOST
    d.wait(Released)
    other = engine({}, seed=1, lease=60.0)
    d.agents[0].fetch(fetch(other.source, [3, 4], 8, transfer=name(1), handle="1"))
    other.agents[0].offer(offered([1], 4, transfer=name(1), final=False))
    until(lambda: d.block(3).any())
    d.agents[0].close()
    (end,) = other.wait(Ended)
    assert end.outcome.kind is FailureKind.CANCELLED
    other.wait(Released)


def test_a_revocation_counts_though_another_thread_closes_the_agent(engine: Callable[..., SeededEngine]) -> None:
    """It has said why it ends, and not yet that nothing it has offered is to be trusted: the blocks are overwritten next."""
    agent = engine({}, seed=1).agents[0]
    counter = RevocationView(agent._revocations.invite())
    agent.offer(offered([1], 4, transfer=name(0)))
    before = counter()
    agent._loop.why = CLOSED
    with pytest.raises(ClosedError):
        agent.revoke(name(0), 1, "the engine needs the blocks", gone=True)
    assert counter() > before


def test_what_comes_after_a_failure_of_the_agent_ends_at_once(engine: Callable[..., SeededEngine]) -> None:
    """Its engine has not closed it, and an exception in the middle of a step would cost it all of its requests."""
    p, d = engine({}, seed=1), engine({})
    agent = d.agents[0]
    agent.begin_close(Failure(FailureKind.BACKEND_FAILED, "it has died"))
    agent._loop.thread.join(10.0)
    agent.events()

    for i in range(2):
        agent.fetch(fetch(p.source, [1], 4, transfer=name(i), handle=str(i)))
        agent.offer(offered([1], 4, transfer=name(10 + i), final=False), after=Never())
        agent.offer(offered([1, 2], 8, transfer=name(10 + i)))
        agent.revoke(name(10 + i), 1, "over", gone=True)
        agent.renew(name(10 + i))
        agent.cancel(str(i), "over")
    events = agent.events()
    assert [(type(e), e.transfer) for e in events] == [
        (sort, t) for i in range(2) for t in (name(i), name(10 + i)) for sort in (Ended, Released)
    ]
    assert all(e.outcome.kind is FailureKind.BACKEND_FAILED for e in events if isinstance(e, Ended))
    assert agent.close() and agent.events() == []


def test_an_offer_behind_a_fence_that_never_passes_ends_with_its_lease(engine: Callable[..., SeededEngine]) -> None:
    """Of an engine's device that hangs: nobody heard of the offer again, its blocks were kept, and its fence asked for ever."""
    p, d = engine({}, seed=1, lease=2.0), engine({})
    fence = Never()
    meet(d, p)
    p.agents[0].offer(offered([1], 4, transfer=name(0)), after=fence)
    p.agents[0].offer(offered([2], 4, transfer=name(1), final=False))
    d.agents[0].fetch(fetch(p.source, [1], 4, transfer=name(0), handle="first"))
    d.agents[0].fetch(fetch(p.source, [2, 3], 8, transfer=name(1), handle="amid"))
    until(lambda: d.block(2).any())
    p.agents[0].offer(offered([2, 3], 8, transfer=name(1)), after=fence)
    for side in (p, d):
        ends = side.wait(Ended, count=2)
        assert {e.outcome.kind for e in ends} == {FailureKind.BACKEND_FAILED}, ends
        assert all(
            "its fence failed: it has not passed within the lease of 2 s" in str(e.outcome.failure) for e in ends
        )
        side.wait(Released, count=2)
    asked = fence.asked
    works(p, d)
    assert fence.asked == asked


def test_a_back_end_that_hangs_holds_nobody_up_and_releases_nothing(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free, begun, hangs = threading.Event(), started(monkeypatch, "engine1"), threading.Event()
    p, d = engine({"verbs": ["read"]}, seed=1), engine({"verbs": ["read"]})
    agent, poll = d.agents[0], FakeTransport.poll

    def hang(self: FakeTransport) -> list[Any]:
        if self.agent.startswith("engine1") and begun.is_set():
            hangs.set()
            free.wait(60)
        return poll(self)

    monkeypatch.setattr(FakeTransport, "poll", hang)
    agent.fetch(fetch(p.source, [1], 4, transfer=name(0)))
    p.agents[0].offer(offered([1], 4, transfer=name(0)))
    assert hangs.wait(60)
    assert agent.close(0.5) is False  # and does not wait for what hangs
    assert "may still be touched" in caplog.text
    events = agent.events()
    assert [type(e) for e in events] == [Ended] and agent.stats().fetches == 1
    free.set()
    until(lambda: agent.stats().fetches == 0)
    assert [type(e) for e in agent.events()] == [Released]
    assert agent.close()


def test_memory_that_never_gets_quiet_is_not_released(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, begun = {"verbs": ["read"], "delay_s": 5.0, "quiet": "never"}, started(monkeypatch)
    p, d = engine(dict(options), seed=1), engine(dict(options))
    d.agents[0].fetch(fetch(p.source, [1], 4, transfer=name(0)))
    p.agents[0].offer(offered([1], 4, transfer=name(0)))
    assert begun.wait(60)
    assert d.agents[0].close() is False
    assert [type(e) for e in d.agents[0].events()] == [Ended]


def test_close_from_within(engine: Callable[..., SeededEngine]) -> None:
    """By a callback on the control thread, which cannot wait for itself."""
    e = engine({})
    agent = e.agents[0]

    class Closing:
        event = None

        def passed(self) -> bool:
            agent.close()
            return True

    agent.offer(offered([1], 4, transfer=name(0)), after=Closing())
    until(lambda: not agent._loop.thread.is_alive())
    assert agent.close()
    assert set(outcomes(agent)) == {name(0)}


# --- what engines and back ends raise ----------------------------------------------------------------------------------

RAISED = [
    SystemExit("leave"),
    KeyboardInterrupt("stop"),
    asyncio.CancelledError("cancelled"),
    GeneratorExit("done"),
    ValueError("bad"),
]


@pytest.mark.parametrize("raised", RAISED, ids=repr)
@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_fence_that_raises_fails_its_offer_alone(
    engine: Callable[..., SeededEngine], raised: BaseException, when: str
) -> None:
    p, d = engine({}, seed=1), engine({})

    class Failing:
        event = None
        asked = 0

        def passed(self) -> bool:
            self.asked += 1
            if when == "later" and self.asked < 3:
                return False
            raise raised

    p.agents[0].offer(offered([1], 4, transfer=name(0)), after=Failing())
    (end,) = p.wait(Ended)
    assert end.outcome.kind is FailureKind.BACKEND_FAILED and str(raised) in end.outcome.failure.detail
    p.wait(Released)
    works(p, d)


METHODS = ["endpoint", "connect", "submit", "poll", "lost", "disconnect", "fileno"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("raised", [SystemExit("leave"), asyncio.CancelledError("cancelled")], ids=repr)
def test_a_back_end_may_raise_anything(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, method: str, raised: BaseException
) -> None:
    """Once: then what was in hand has an outcome, and the next transfer is delivered."""
    p, d = engine({"verbs": ["read"]}, seed=1), engine({"verbs": ["read"]})
    works(p, d)
    d.events().clear()
    given, original = [True], getattr(FakeTransport, method)

    def fail(self: FakeTransport, *args: Any) -> Any:
        if self.agent.startswith("engine1") and given:
            given.pop()
            raise raised
        return original(self, *args)

    monkeypatch.setattr(FakeTransport, method, fail)
    other = engine({"verbs": ["read"]}, seed=1)
    d.agents[0].fetch(fetch(other.source, [7], 4, transfer=name(0), handle="0"))
    other.agents[0].offer(offered([7], 4, transfer=name(0)))
    until(lambda: any(isinstance(e, Released) and e.transfer == name(0) for e in d.events()))
    assert d.agents[0]._loop.thread.is_alive()
    d.events().clear()
    works(p, d)


@pytest.mark.parametrize("failing", ["disconnect", "poll"])
def test_memory_that_a_peer_may_go_on_writing_is_not_released_by_closing_its_link(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The back end could not be closed either, so nothing ends what the peer writes; not even a link that is made anew."""
    options, begun = {"verbs": ["write"], "delay_s": 1.5, "run_bytes": 1}, started(monkeypatch, "engine0")
    p, d = (engine(dict(options), seed=seed, transfer_timeout=6.0) for seed in (1, None))
    agent, left = d.agents[0], {failing: 0, "close": 0}
    for method in ("disconnect", "abort", "poll", "close"):
        original = getattr(FakeTransport, method)

        def act(self: FakeTransport, *args: Any, method: str = method, original: Callable[..., Any] = original) -> Any:
            if self.agent == agent._name and left.get(method):
                left[method] -= 1
                raise TransportError("it cannot be closed")
            stays = self.agent == p.agents[0]._name and method in ("disconnect", "abort")
            return None if stays else original(self, *args)

        monkeypatch.setattr(FakeTransport, method, act)
    p.agents[0].offer(offered([1], 4, transfer=name(0)))
    agent.fetch(fetch(p.source, [1], 4, transfer=name(0)))
    assert begun.wait(60)
    left.update(dict.fromkeys(left, 1))
    facts = {"weights": "others"} if failing == "disconnect" else None
    if facts is not None:
        agent.identify(facts)  # which closes all links
    other = engine({"verbs": ["write"], "run_bytes": 1}, seed=2, facts=facts)
    agent.prepare(other.source)  # which wakes the data thread
    until(lambda: not any(left.values()))
    until(lambda: np.array_equal(d.block(1), p.block(1)))  # the peer has written all the same
    assert [e for e in d.events() if isinstance(e, Released)] == []
    assert not d.wait(Ended)[0].outcome.delivered
    works(other, d)


def no_thread(name: str) -> Callable[..., None]:
    """Make `Thread.start` refuse the first thread of this name, as where the limit of processes is reached for a while."""
    start, refused = threading.Thread.start, list[str]()

    def refuse(self: threading.Thread) -> None:
        if self.name == name and not refused:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        start(self)

    return refuse


def none_left(*_: Any) -> None:
    raise MemoryError("none left")


MISTAKES: dict[str, tuple[Any, str, Callable[..., None], dict[str, Any]]] = {
    "no thread for hellos": (threading.Thread, "start", no_thread("kvxfer-hellos"), {"verbs": ["read"]}),
    "no thread for cards": (threading.Thread, "start", no_thread("kvxfer-examine"), {"verbs": ["read"]}),
    "no thread for sums": (threading.Thread, "start", no_thread("kvxfer-hash"), {"verbs": ["read"]}),
    "a plan that cannot be made": (CopyPlan, "runs", none_left, {"verbs": ["write"], "run_bytes": 1}),
    "a sum that cannot be made": (CpuSpace, "checksum", none_left, {}),
    "a sum that ends the process": (CpuSpace, "checksum", lambda *_: sys.exit("leave"), {}),
}
"""What fails, how, and the options of the fake."""


@pytest.mark.parametrize("what", MISTAKES)
def test_what_fails_on_this_side_fails_its_transfer_alone(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    owner, method, fails, options = MISTAKES[what]
    p, d = (engine(dict(options), seed=seed, integrity="full", transfer_timeout=5.0, lease=2.0) for seed in (1, None))
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, fails)
        p.agents[0].offer(offered([1], 4, transfer=name(0)))
        d.agents[0].fetch(fetch(p.source, [1], 4, transfer=name(0), handle="0"))
        assert not d.over("0").outcome.delivered
        p.wait(Released)
    works(p, d)
    assert all(e.agents[0].close() for e in (d, p))


def test_a_directory_that_gets_no_thread_keeps_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with Directory(Config()) as other:
        config = Config(port=other.source.port)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread("kvxfer-dir"))
        with pytest.raises(RuntimeError, match="new thread") as failed:
            Directory(config)
    with Directory(config) as found:
        assert found.source.port == config.port
    del failed  # and what it leads to


def test_a_back_end_whose_constructor_raises_anything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTransport, "__init__", lambda *_: sys.exit(3))
    threads = set(threading.enumerate())
    with pytest.raises(Exception, match="SystemExit"):
        Agent(PagedMemory().caches[0], Config(backend=FAKE))
    assert not set(threading.enumerate()) - threads


# --- threads that die all the same -------------------------------------------------------------------------------------


@pytest.fixture
def unhandled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Threads may die in this test without a word of pytest's."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield


def kill_control(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def turn() -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(logging.getLogger("kvxfer.agent"), "exception", lambda *_: 1 / 0)
    monkeypatch.setattr(agent._loop, "_turn", turn)


def kill_data(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    data = agent._data._first
    monkeypatch.setattr(data, "_turn", lambda: 1 / 0)
    monkeypatch.setattr(data, "_reset", lambda _: 1 / 0)


def kill_hasher(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    def get() -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(agent._hasher, "_serve", get)
    agent._hasher._thread.start()
    agent._hasher._started = True


@pytest.mark.usefixtures("unhandled")
@pytest.mark.parametrize(
    ("kill", "who"),
    [
        (kill_control, "the control thread"),
        (kill_data, "the data thread of back end"),
        (kill_hasher, "the thread for checksums"),
    ],
)
def test_if_a_thread_dies_nothing_waits_for_it(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch, kill: Callable[..., None], who: str
) -> None:
    p, d = engine({}, seed=1, transfer_timeout=60.0), engine({}, transfer_timeout=60.0)
    agent = d.agents[0]
    agent.fetch(fetch(p.source, [1], 4, transfer=name(0), handle="0"))
    agent.offer(offered([2], 4, transfer=name(1)))
    time.sleep(0.1)
    kill(agent, monkeypatch)
    agent.renew(name(1))
    # Wakes it. It is ignored: what comes of an answer that nobody asked for is not looked at here.
    agent._data._first.post(Abort(PartRef("consumer", b"none", name(9), 1, 1)))
    until(lambda: not agent._loop.thread.is_alive())
    agent.fetch(fetch(p.source, [3], 4, transfer=name(2), handle="2"))
    ended = outcomes(agent)
    assert set(ended) == {name(0), name(1), name(2)}
    for e in ended.values():
        assert e.outcome.kind is FailureKind.BACKEND_FAILED and who in e.outcome.failure.detail


def test_an_agent_and_a_directory_that_are_dropped_let_everything_go() -> None:
    """With a warning, which names what was dropped."""
    memory, config = PagedMemory(blocks=4), Config(backend="kvxfer.testing.fake:FakeTransport")
    others = set(threading.enumerate())

    def drop() -> None:
        agent = Agent(memory.caches[0], config)
        directory = Directory(config)
        directory.publish((agent.descriptor,))
        with pytest.warns(ResourceWarning, match="agent was dropped without being closed"):
            del agent
            gc.collect()
        with pytest.warns(ResourceWarning, match="directory was dropped without being closed"):
            del directory
            until(lambda: gc.collect() >= 0 and not set(threading.enumerate()) - others)

    drop()  # what is made once
    assert not descriptors_kept(drop, 2)
