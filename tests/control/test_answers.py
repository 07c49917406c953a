"""What only the other side can know comes back with its own kind at once, though the deadlines are far."""

import re
import time
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kvxfer import Source
from kvxfer.config import Config
from kvxfer.control import resolver
from kvxfer.control.directory import Directory
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache
from kvxfer.identity import TransferId
from kvxfer.testing.clock import SetForward
from kvxfer.testing.fake import FakeTransport
from tests.control.conftest import Ended, fetch, offered, until, works
from tests.ports import NOBODY

K = FailureKind
T = TransferId("own/1/x", 0)
FAR = {"transfer_timeout": 300.0, "peer_timeout": 100.0, "lease": 300.0}
"""Far behind the end of a test that waits for an answer."""


def told(agent, source: Source, **more) -> Failure:
    ends: list[Ended] = []
    agent.fetch(replace(fetch(source, [5, 2, 9], 11, transfer=T), **more))
    until(lambda: bool(ends.extend(e for e in agent.events() if isinstance(e, Ended)) or ends))
    failure = ends[0].outcome.failure
    assert failure is not None
    return failure


ANSWERS: dict[str, tuple[Callable[..., tuple[Source, dict]], FailureKind, str]] = {
    "nobody listens": (lambda p: (Source("127.0.0.1", NOBODY, 7), {}), K.NO_SUCH_ENGINE, "Connection refused"),
    "no such name": (lambda p: (Source("gone.invalid", 7000, 7), {}), K.REFUSED, "'gone.invalid' is a name"),
    "another engine": (lambda p: (Source("127.0.0.1", p.source.port, 7), {}), K.NO_SUCH_ENGINE, "has restarted since"),
    "forgotten": (lambda p: (p.source, {"offered": True}), K.WITHDRAWN, "not known here any more"),
    "less offered": (
        lambda p: (p.agents[0].offer(offered([3], 4, transfer=T)), (p.source, {}))[1],
        K.NEVER_OFFERED,
        "4 tokens",
    ),
    "another prompt": (
        lambda p: (p.agents[0].offer(offered([3, 1, 7], 11, transfer=T, digest=b"other")), (p.source, {}))[1],
        K.DIGEST_DIFFERS,
        "",
    ),
}
"""The case, what is there, and what a load is told."""


@pytest.mark.parametrize("case", ANSWERS)
def test_the_other_side_answers_at_once(engine, case: str) -> None:
    there, kind, words = ANSWERS[case]
    p, d = engine({}, seed=1, **FAR), engine({}, **FAR)
    source, more = there(p)
    failure = told(d.agents[0], source, **more)
    assert failure.kind is kind and words in failure.detail, failure


def test_where_a_router_named_the_engine_it_is_waited_for_and_the_reason_stays(engine) -> None:
    """It may be about to start; who waits in vain is told what stood in the way, not that nobody answered."""
    begun = time.monotonic()
    failure = told(engine({}, peer_timeout=0.6).agents[0], Source("127.0.0.1", NOBODY, 0))
    assert time.monotonic() - begun >= 0.6
    assert failure.kind is K.PEER_UNREACHABLE
    assert "it cannot be reached: Connection refused, for 0.6 s" in failure.detail
    with Directory(Config(), "late") as late:
        failure = told(engine({}, peer_timeout=0.6).agents[0], late.source)
    assert failure.kind is K.NOT_PUBLISHED and "name it to others once its ranks are published" in failure.advice


@pytest.mark.parametrize(
    ("who", "nbytes", "words"),
    [
        ("engine1", 300 << 10, "with its endpoint, of .* bytes, the hello has .*, and a peer takes 262144"),
        ("engine1", 2 << 20, "our back end: the back end made an endpoint of 2097152 bytes, more than 1048576"),
        (
            "engine0",
            2 << 20,
            "the producer's back end: the back end made an endpoint of 2097152 bytes, more than 1048576",
        ),
    ],
)
def test_an_endpoint_that_is_too_long_is_named(
    engine, monkeypatch: pytest.MonkeyPatch, who: str, nbytes: int, words: str
) -> None:
    """The peer would hang up on whoever sent it, and not be able to say why."""
    made = FakeTransport.endpoint_lending

    def pad(self: FakeTransport, *args) -> bytes:
        return made(self, *args) if not self.agent.startswith(who) else bytes(nbytes)

    monkeypatch.setattr(FakeTransport, "endpoint_lending", pad)
    p, d = engine({}, seed=1, **FAR), engine({}, **FAR)
    failure = told(d.agents[0], p.source)
    assert failure.kind is K.BACKEND_FAILED
    assert re.search(words, failure.detail), failure


def test_a_host_that_stands_still_while_it_checks_what_a_peer_says_of_itself_refuses_nobody(
    clock: SetForward, engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = engine({}, seed=1, **FAR), engine({}, **FAR)
    check = Cache.check

    def late(cache: Cache) -> None:
        check(cache)
        clock.forward(3.0)

    monkeypatch.setattr(Cache, "check", late)
    works(p, d)
    assert clock.now() - time.monotonic() > 2.0, "it has stood still"


def test_a_descriptor_that_takes_too_long_to_check_is_refused(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "CHECK_S", 0.01)
    check = Cache.check

    def long(cache: Cache) -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            check(cache)

    p, d = engine({}, seed=1, **FAR), engine({}, **FAR)
    monkeypatch.setattr(Cache, "check", long)
    failure = told(d.agents[0], p.source)
    assert failure.kind is K.INCOMPATIBLE and "more than can be checked in 0.01 s" in failure.detail


def test_a_load_goes_on_once_the_ranks_of_its_source_are_published(engine) -> None:
    p, d = engine({}, seed=1), engine({})
    with Directory(Config(), "late", epoch=p.agents[0].epoch) as late:
        d.agents[0].fetch(fetch(late.source, [5, 2, 9], 12, transfer=T))
        time.sleep(0.3)
        assert not d.events()
        late.publish((p.agents[0].descriptor,))
        p.agents[0].offer(offered([1, 2, 3], 12, transfer=T))
        assert d.over("req").outcome.delivered
