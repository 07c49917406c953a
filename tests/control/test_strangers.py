"""What anybody who can reach the control sockets may say: nothing of it ends a thread, a transfer, or the service of
others."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import pytest

from kvxfer.config import Config
from kvxfer.control import accept, notices
from kvxfer.control.directory import Directory
from kvxfer.failures import FailureKind
from kvxfer.geometry import ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.messages import Decline, Named, Renew
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.fake import FakeTransport
from kvxfer.values import BlockTable
from tests.control.conftest import SeededEngine, fetch, offered, until, works
from tests.control.stranger import Stranger, acquainted, framed, hello, impostor

T = TransferId("own/1/honest", 0)


@pytest.fixture
def pair(engine) -> tuple[SeededEngine, SeededEngine]:
    options = {"verbs": ["read"]}
    return engine(dict(options), seed=1), engine(dict(options))


REFUSALS = {
    "old epoch": ({"expect_epoch": 7}, FailureKind.PEER_LOST),
    "other protocol": ({"protocol": 99}, FailureKind.INCOMPATIBLE),
    "other back end": ({"backend": "nixl"}, FailureKind.INCOMPATIBLE),
    "other verb": ({"mode": "write"}, FailureKind.INCOMPATIBLE),
    "assignments beyond the cache": ({"assignments": (ShardAssignment(0, 9, ("x",), 0, 1),)}, FailureKind.INCOMPATIBLE),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_hello_that_does_not_fit_is_refused_with_the_reason(
    pair: tuple[SeededEngine, SeededEngine], what: str
) -> None:
    p, d = pair
    changes, kind = REFUSALS[what]
    with Stranger(p.agents[0].descriptor.address) as s:
        s.say(hello(p, **changes))
        refused = s.answer()
        assert isinstance(refused, m.Refused) and refused.kind is kind and refused.reason and not refused.again, refused
    works(p, d)


class Tracked(FakeTransport):
    """Knows which of its endpoints are neither connected nor withdrawn."""

    made: ClassVar[list[Tracked]] = []

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        super().__init__(agent, options)
        self.kept: list[bytes] = []
        self.given = 0
        self.made.append(self)

    def endpoint_lending(self, memories: Collection[int], writable: bool) -> bytes:
        self.kept.append(super().endpoint_lending(memories, writable))
        self.given += 1
        return self.kept[-1]

    def connect(self, mine: bytes, theirs: bytes) -> int:
        peer = super().connect(mine, theirs)
        self.kept.remove(mine)
        return peer

    def withdraw(self, endpoint: bytes) -> None:
        super().withdraw(endpoint)
        self.kept.remove(endpoint)


def test_links_that_come_to_nothing_leave_no_endpoints(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with the producer, to whom strangers say hello, nor with the consumer, who dials where nobody is."""
    monkeypatch.setattr(Tracked, "made", [])
    backend = f"{__name__}:Tracked"
    p, d = (engine({"verbs": ["read"], "backend": backend}, seed=seed, peer_timeout=3.0) for seed in (1, None))
    of_p, of_d = Tracked.made
    for _ in range(5):
        with Stranger(p.agents[0].descriptor.address) as s:
            s.say(hello(p))
            refused = s.answer()
            assert isinstance(refused, m.Refused) and refused.kind is FailureKind.BACKEND_FAILED
    works(p, d)
    assert of_p.given == 6
    p.agents[0].close()

    def late(i: int) -> FailureKind:
        d.agents[0].fetch(fetch(p.source, [5], 4, transfer=TransferId("own/1/late", i), handle=f"late {i}"))
        end = d.wait(Ended, count=2 + i)[1 + i]
        d.wait(Released, count=2 + i)
        return end.outcome.kind

    # The first may be asked for before the consumer has heard that its link is gone.
    assert late(0) in {FailureKind.PEER_UNREACHABLE, FailureKind.PEER_LOST}
    assert {late(i) for i in (1, 2)} == {FailureKind.PEER_UNREACHABLE}
    with socket.create_server(("127.0.0.1", int(p.agents[0].descriptor.address.rpartition(":")[2]))):
        assert late(3) is FailureKind.PEER_UNREACHABLE
    assert of_d.given >= 2
    until(lambda: not of_p.kept and not of_d.kept)


def test_messages_on_a_link_that_is_not_known_are_told_to_dial(pair: tuple[SeededEngine, SeededEngine]) -> None:
    p, _ = pair
    with Stranger(p.agents[0].descriptor.address) as s:
        for msg in (
            m.Ping(1),
            m.CommitRequest(T, 1, 1),
            m.CloseAttempt(T, 1, b"d", FailureKind.CANCELLED, "?"),
            m.FetchRequest(T, 1, b"d", 0, 4, BlockTable((b"",)), 1, 1.0),
        ):
            s.say(msg)
            refused = s.answer()
            assert isinstance(refused, m.Refused) and refused.again


def test_another_version_is_told_so(pair: tuple[SeededEngine, SeededEngine]) -> None:
    p, _ = pair
    for address in (p.agents[0].descriptor.address, f"tcp://127.0.0.1:{p.source.port}"):
        with Stranger(address) as s:
            s.send(b"\x92\xa7welcome\x01")
            refused = s.answer()
            assert isinstance(refused, m.Refused) and refused.kind is FailureKind.INCOMPATIBLE


JUNK = [b"", b"\xff" * 100, b"[1,2]", m.encode(m.Pong(1)), m.encode(m.Welcome(1, b"", 1)), b"\x94" * 5000]
"""Frames; `tests/fuzz` has many more."""
RAW = [
    b"",
    b"\0\0\0\0" * 1000,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 100,
    b"\x0b\0\0\0half",
    framed(b"x" * m.MAX_BYTES)[:1000],
    b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48),
    framed(m.encode(m.Ping(1))) + b"\1",
]


def test_junk_at_both_sockets_changes_nothing(
    pair: tuple[SeededEngine, SeededEngine], caplog: pytest.LogCaptureFixture
) -> None:
    p, d = pair
    threads = set(threading.enumerate())
    for address in (p.agents[0].descriptor.address, f"tcp://127.0.0.1:{p.source.port}"):
        for raw in [*RAW, *map(framed, JUNK)]:
            with Stranger(address) as s:
                s.socket.sendall(raw)
        with Stranger(address) as s, suppress(ConnectionError):
            for frame in JUNK:
                s.send(frame)
        with Stranger(address) as s, suppress(ConnectionError):
            s.send(b"x" * (m.MAX_BYTES + 1))
            assert s.hung_up_on()
    works(p, d)
    begun = {t.name for t in set(threading.enumerate()) - threads}
    assert begun == {"kvxfer-hellos", "kvxfer-examine"}, "those that look at hellos and at cards"
    assert not [r for r in caplog.records if r.exc_info], "something was not handled"
    assert max(len(r.getMessage()) for r in caplog.records) < 1000, "what a stranger says is logged whole"


def test_directory_hears_only_news_for_its_epoch(pair: tuple[SeededEngine, SeededEngine]) -> None:
    p, _ = pair
    with Stranger(f"tcp://127.0.0.1:{p.source.port}") as s:
        for epoch in (p.source.epoch, 7, p.source.epoch):
            s.say(Renew(epoch, (Named(T, b"d"),)))
            s.say(Decline(epoch, (Named(T, b"d"),), "rejected"))
        s.say(m.Lookup(m.PROTOCOL))
        assert isinstance(s.answer(), m.EngineDescriptor)  # in order: what came before has been taken in
    assert len(p.directory.notices()) == 4


@pytest.mark.parametrize(("many", "length"), [(2500, 20), (1000, 300), (40, 16_000)])
def test_notices_of_long_names_are_heard(pair: tuple[SeededEngine, SeededEngine], many: int, length: int) -> None:
    """A client chooses its request's name, and must not cost others the renewal of their leases."""
    p, d = pair
    named = tuple(Named(TransferId(f"{i}/1/".ljust(length, "x"), 0), bytes(32)) for i in range(many))
    d.directory.tell(p.source, Renew(p.source.epoch, named))
    heard: list[Named] = []
    until(lambda: bool(heard.extend(x for n in p.directory.notices() for x in n.transfers) or len(heard) >= many))
    assert tuple(heard) == named and not d.directory.notices()


TIMES = {1000: 100, 100: 12, 10: 12, 1: 12}
"""How often a stranger says a notice that names so many transfers."""


def test_whoever_fills_a_directory_leaves_room_for_others(pair: tuple[SeededEngine, SeededEngine]) -> None:
    """However many there are, and however small what each says last."""
    p, _ = pair
    named = tuple(Named(TransferId(f"own/{i}", i), b"d" * 32) for i in range(1000))
    flood = [Decline(p.source.epoch, named[:size], "x") for size, times in TIMES.items() for _ in range(times)]
    address = f"tcp://127.0.0.1:{p.source.port}"
    with contextlib.ExitStack() as stack:
        for _ in range(24):
            stranger = stack.enter_context(Stranger(address))
            for notice in flood:
                stranger.say(notice)
            stranger.say(m.Lookup(m.PROTOCOL))
            assert isinstance(stranger.answer(), m.EngineDescriptor)  # all of it has been taken in, or dropped
        honest = stack.enter_context(Stranger(address))
        honest.say(Renew(p.source.epoch, (Named(T, b"d"),)))
        honest.say(m.Lookup(m.PROTOCOL))
        assert isinstance(honest.answer(), m.EngineDescriptor)
        heard = p.directory.notices()
    assert sum(len(m.encode(notice)) for notice in heard) <= notices.MAX_NOTICES, "they were bounded"
    assert [notice for notice in heard if isinstance(notice, Renew)] == [Renew(p.source.epoch, (Named(T, b"d"),))]


def test_however_many_links_strangers_keep_alive_the_next_one_is_made(
    engine, pair: tuple[SeededEngine, SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the cost of one over which nothing moves, of whoever has most of them."""
    monkeypatch.setattr(accept, "MAX_LINKS", 4)
    p, d = pair

    def asks(stack: ExitStack, i: int, transfer: str) -> Stranger:
        s = stack.enter_context(acquainted(p, epoch=i))
        s.say(m.FetchRequest(TransferId(transfer, 0), 1, b"d", 0, 4, BlockTable.of([[1]]), 1, 20.0))
        s.say(m.Ping(1))
        assert isinstance(s.answer(), m.PartReady if transfer == "own/1/kept" else m.Pong)
        return s

    works(p, d)
    with ExitStack() as stack:
        p.agents[0].offer(offered([3], 4, transfer=TransferId("own/1/kept", 0)))
        waiting = [asks(stack, i, f"never {i}") for i in range(1, 4)]
        works(p, engine({"verbs": ["read"]}))
        assert len([link for link in p.agents[0].links() if link.up]) == 4
        assert waiting[0].hung_up_on()  # of the one who has most links, that which was used longest ago
        for kept in waiting[1:]:
            kept.say(m.Ping(2))
            assert isinstance(kept.answer(), m.Pong)
        works(p, d)
        for i in range(4, 8):
            asks(stack, i, "own/1/kept")
        with Stranger(p.agents[0].descriptor.address) as s:
            s.say(hello(p))
            refused = s.answer()
            assert isinstance(refused, m.Refused) and refused.kind is FailureKind.OVERLOADED


def announced(piece_bytes: int) -> m.PartReady:
    return m.PartReady(T, 1, 1, 0, 0, 4, True, BlockTable.of([[3]]), 0, piece_bytes)


ANSWERS: dict[str, tuple[dict[str, Any], m.PartReady | None, FailureKind]] = {
    "larger pieces than we have room for": ({"piece_bytes": 1 << 40}, None, FailureKind.INCOMPATIBLE),
    "pieces of nothing": ({"piece_bytes": 0}, None, FailureKind.INCOMPATIBLE),
    "fewer checks than we ask for": ({"integrity": "off"}, None, FailureKind.INCOMPATIBLE),
    "smaller pieces than were agreed on": ({}, announced(1), FailureKind.MISUSE),
    "larger pieces than were agreed on": ({}, announced(1 << 40), FailureKind.MISUSE),
}
"""What a producer changes in its welcome, how it announces a part, and how the load ends."""


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_does_not_fit_the_question_fails_its_load(
    engine, pair: tuple[SeededEngine, SeededEngine], what: str
) -> None:
    """Small pieces would keep the data thread busy for ever, large ones run over the slots."""
    changes, have, kind = ANSWERS[what]
    d, other = engine({"verbs": ["read"]}, integrity="sample"), FakeTransport("other", {"verbs": ["read"]})
    terms: dict[str, Any] = {"piece_bytes": 4096, "integrity": "sample", **changes}
    says: dict[type, m.Message] = {m.Hello: m.Welcome(78, other.endpoint(), **terms)}
    with impostor(d, says | ({m.FetchRequest: have} if have else {})) as source:
        d.agents[0].fetch(fetch(source, [5], 4, transfer=T))
        (end,) = d.wait(Ended)
    assert end.outcome.kind is kind, end
    works(pair[0], d)
    other.close()


def test_who_takes_the_public_number_of_a_consumer_is_not_taken_for_it(pair: tuple[SeededEngine, SeededEngine]) -> None:
    """A directory tells anybody the epochs of its ranks: in their name, what they had not asked for yet could be said to be over."""
    p, d = pair
    with Stranger(f"tcp://127.0.0.1:{d.source.port}") as asking:
        asking.say(m.Lookup(m.PROTOCOL))
        found = asking.answer()
    assert isinstance(found, m.EngineDescriptor)
    with acquainted(p, epoch=found.ranks[0].epoch) as s:
        for attempt in range(1, 20):
            s.say(m.Committed(T, attempt, b"guessed"))
        s.say(m.Ping(1))
        assert isinstance(s.answer(), m.Pong)
        p.agents[0].offer(offered([3], 4, transfer=T))
        d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
        assert d.wait(Ended)[0].outcome.delivered


def test_what_strangers_wait_for_is_forgotten_with_their_connections() -> None:
    """And with it what they have sent: without a key, anybody could fill the memory by connecting again and again."""
    named = m.Named(TransferId("own/1/never", 0), b"d")
    half = framed(bytes(200 << 10))[:-1]
    with Directory(Config(), "p") as directory:
        directory.begun = lambda transfer, digest: False
        at = f"tcp://{directory.source.host}:{directory.source.port}"
        lost: list[weakref.ref[Any]] = []
        told, directory._await = directory._await, lambda c, n: (lost.append(weakref.ref(c)), told(c, n))  # type: ignore[method-assign]
        for _ in range(5):
            with Stranger(at) as s:
                s.say(m.Await(0, (named,)))
                s.socket.sendall(half)
                s.socket.shutdown(socket.SHUT_WR)
                assert s.hung_up_on()
        until(lambda: not len(directory._awaited))
        until(lambda: not any(ref() is not None and ref().held for ref in lost))
        assert len(lost) == 5
