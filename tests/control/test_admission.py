"""Names in the list of peers: who may connect is who has an address to which one of them leads now."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.control import admission
from kvxfer.control.admission import Admission
from kvxfer.control.sockets import ControlSockets
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended
from kvxfer.security import Security
from tests.control.conftest import SeededEngine, fetch, offered
from tests.control.stranger import framed

T = TransferId("own/1/x", 0)


class Names:
    """A resolver that the test decides about."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.asked: list[str] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __call__(self, host: str, port: object, **options: object) -> list[Any]:
        self.asked.append(host)
        self.goes_on.wait(20)
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "unknown")
        return [(None, None, 0, "", (address, 0)) for address in self.known[host]]


def resolve_with(monkeypatch: pytest.MonkeyPatch, how: Callable[..., Any]) -> None:
    monkeypatch.setattr(admission, "socket", SimpleNamespace(getaddrinfo=how, SOCK_STREAM=socket.SOCK_STREAM))


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    resolve_with(monkeypatch, made)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(admission, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize(
    "peers", [["localhost"], ["gpu-7.invalid", "localhost:1"], ["LOCALHOST"], ["10.0.0.0/8", " localhost "]]
)
def test_an_engine_is_let_in_by_its_name(engine: Callable[..., SeededEngine], peers: list[str]) -> None:
    p, d = engine({}, seed=1, peers=peers), engine({})
    p.agents[0].offer(offered([3], 4, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    assert d.wait(Ended)[0].outcome.delivered


def test_an_engine_whose_name_is_not_listed_is_turned_away(engine: Callable[..., SeededEngine]) -> None:
    p, d = engine({}, peers=["gpu-7.invalid"]), engine({}, peer_timeout=1.0)
    d.agents[0].fetch(fetch(p.source, [5], 4, transfer=T))
    assert d.wait(Ended)[0].outcome.kind is FailureKind.PEER_UNREACHABLE


def test_what_a_name_leads_to_counts_for_a_bounded_time(names: Names, clock: list[float]) -> None:
    names.known = {"a": ["10.0.0.1", "fd00::1%eth0"]}
    judge = Admission(("a", "192.168.0.0/16"))
    assert judge.admits("192.168.3.4") and not names.asked
    assert judge.admits("10.0.0.1") is None
    judge.resolve()
    assert judge.admits("10.0.0.1") and judge.admits("::ffff:10.0.0.1") and judge.admits("fd00::1%eth1")
    assert judge.admits("10.0.0.2") is False, "a stranger has every connection of his looked up"
    clock[0] += admission.RETRY_S
    assert judge.admits("10.0.0.2") is None
    names.known = {"a": ["10.0.0.2"]}
    judge.resolve()
    assert judge.admits("10.0.0.2") and judge.admits("10.0.0.1") is False
    assert not judge.old
    clock[0] += admission.RENEW_S
    assert judge.old and judge.admits("10.0.0.2")
    names.known = {}
    judge.resolve()
    assert judge.admits("10.0.0.2") is False, "the name is gone"


def test_a_resolver_that_fails_for_a_while_ends_nothing_for_a_while(
    names: Names, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    names.known = {"a": ["10.0.0.1"]}
    judge = Admission(("a",))
    judge.resolve()

    def fail(*args: object, **options: object) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    resolve_with(monkeypatch, fail)
    clock[0] += admission.RENEW_S
    judge.resolve()
    assert judge.admits("10.0.0.1")
    clock[0] += admission.KEPT_S
    judge.resolve()
    assert judge.admits("10.0.0.1") is False


def test_only_those_wait_for_a_name_whom_it_decides_about(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Names()
    names.known = {"slow": ["127.0.0.1"]}
    names.goes_on.clear()
    hub = ControlSockets(Security(None, ("slow", "127.0.0.2")))
    port = hub.listen("127.0.0.1", 0)
    resolve_with(monkeypatch, names)
    opened = []
    try:
        for source in ("127.0.0.1", "127.0.0.2"):
            opened.append(socket.create_connection(("127.0.0.1", port), source_address=(source, 0)))
            opened[-1].sendall(framed(source.encode()))
        assert heard(hub, 1) == [b"127.0.0.2"]
        names.goes_on.set()
        assert heard(hub, 1) == [b"127.0.0.1"]
        assert names.asked == ["slow"]
    finally:
        names.goes_on.set()
        for one in opened:
            one.close()
        hub.close()


def test_strangers_who_wait_for_a_name_are_as_bounded_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvxfer.control import guests

    monkeypatch.setattr(guests, "GUESTS", 8)
    names = Names()
    names.goes_on.clear()
    hub = ControlSockets(Security(None, ("slow",)))
    port = hub.listen("127.0.0.1", 0)
    resolve_with(monkeypatch, names)
    opened = []
    try:
        for _ in range(30):
            opened.append(socket.create_connection(("127.0.0.1", port)))
            hub.poll(0.01)
        until = time.monotonic() + 20
        while not names.asked and time.monotonic() < until:
            hub.poll(0.01)
        assert len(hub._guests) <= 8 and names.asked == ["slow"]
        names.goes_on.set()
        until = time.monotonic() + 20
        while hub._guests:
            assert time.monotonic() < until, "who is not in the list is still held"
            hub.poll(0.01)
    finally:
        names.goes_on.set()
        for one in opened:
            one.close()
        hub.close()


def heard(hub: ControlSockets, count: int) -> list[bytes]:
    out: list[bytes] = []
    until = time.monotonic() + 20
    while len(out) < count:
        assert time.monotonic() < until, out
        hub.poll(0.01)
        out += [frame for c in hub.ready() if (frame := c.receive()) is not None]
    return out
