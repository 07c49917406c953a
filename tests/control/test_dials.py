"""A directory names ranks as it likes: what it says costs the load that asked it, not this engine's descriptors or time."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import pytest

from kvxfer.config import Config
from kvxfer.control import outbound
from kvxfer.control.accept import AcceptPolicy
from kvxfer.failures import FailureKind
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from tests.control.conftest import SeededEngine, fetch, until
from tests.control.hostile import Hostile
from tests.control.test_strangers import honest

K = FailureKind
BAIT = TransferId("own/1/bait", 0)


@pytest.fixture
def liar() -> Iterator[Hostile]:
    hostile = Hostile(Config(backend="kvxfer.testing.fake:FakeTransport"))
    yield hostile
    hostile.close()


@pytest.fixture
def pair(engine) -> tuple[SeededEngine, SeededEngine]:
    calm = {"transfer_timeout": 20.0, "peer_timeout": 4.0}
    return engine({"verbs": ["read"]}, seed=1, **calm), engine({"verbs": ["read"]}, **calm)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [(3000, f"describes 3000 ranks; at most {m.MAX_RANKS}"), (300, "would have to read from 300 ranks")],
)
def test_an_engine_of_too_many_ranks_is_refused_by_name(
    pair: tuple[SeededEngine, SeededEngine], liar: Hostile, ranks: int, why: str
) -> None:
    p, d = pair
    honest(p, d)
    before = len(os.listdir("/proc/self/fd"))
    d.agents[0].fetch(fetch(liar.lie(p.source, ranks), [6], 4, transfer=BAIT, handle="bait"))
    end = d.over("bait")
    assert end.outcome.kind is K.INCOMPATIBLE and why in str(end.outcome.failure), end
    assert len(os.listdir("/proc/self/fd")) < before + 16
    honest(p, d, TransferId("own/1/after", 0))


def sockets() -> set[str]:
    """Return the sockets of this process, by inode: what earlier tests have left may be closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def test_the_ranks_of_one_engine_are_dialled_a_few_at_a_time(
    pair: tuple[SeededEngine, SeededEngine], liar: Hostile
) -> None:
    p, d = pair
    honest(p, d)
    before = sockets()
    d.agents[0].fetch(fetch(liar.lie(p.source, 200), [6], 4, transfer=BAIT, handle="bait"))
    most = 0
    until(lambda: len(sockets() - before) >= outbound.AT_ONCE, 30.0)
    for i in range(10):
        most = max(most, len(sockets() - before))
        honest(p, d, TransferId("own/1/beside", i))
    assert most < outbound.AT_ONCE + 8
    end = d.over("bait", 60.0)
    assert end.outcome.kind is K.PEER_UNREACHABLE, end


def test_ranks_beyond_the_first_are_dialled_as_links_come_up(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "AT_ONCE", 1)
    p, d = engine({"verbs": ["read"]}, seed=1, tp=4), engine({"verbs": ["read"]})
    d.agents[0].prepare(p.source)
    until(lambda: len([link for link in d.agents[0].links() if link.up]) == 4)


def test_a_load_that_needs_more_descriptors_than_there_are_fails_as_that(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not as a peer that cannot be reached; others go on over the links that they have."""
    p, d = engine({"verbs": ["read"]}, seed=1), engine({"verbs": ["read"]}, peer_timeout=2.0)
    other = engine({"verbs": ["read"]}, seed=2)
    honest(p, d)
    monkeypatch.setattr(d.agents[0]._loop.sockets.policy, "dialled", 0)
    d.agents[0].fetch(fetch(other.source, [6], 4, transfer=BAIT, handle="bait"))
    end = d.over("bait")
    assert end.outcome.kind is K.OVERLOADED and "ulimit -n" in str(end.outcome.failure), end
    honest(p, d, TransferId("own/1/after", 0))


def test_who_connects_when_descriptors_are_short_takes_the_place_of_the_silent(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceptPolicy, "short", True)
    p = engine({"verbs": ["read"]}, seed=1)
    with ExitStack() as stack:
        where = (p.source.host, p.source.port)
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(40)]
        until(lambda: _closed(silent[0]))
        honest(p, engine({"verbs": ["read"]}))
        assert sum(map(_closed, silent)) >= 24 and not _closed(silent[-1])


def test_addresses_that_requests_name_take_a_part_of_the_descriptors(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By notices, as for sources that are asked, and by loads. Who is dialled takes the connection and says nothing."""
    d = engine({"verbs": ["read"]}, blocks=256, peer_timeout=3.0)
    for sockets in (d.directory._sockets, d.agents[0]._loop.sockets):
        monkeypatch.setattr(sockets.policy, "unheard", 20)
    with socket.create_server(("0.0.0.0", 0), backlog=512) as silent:
        port, before = silent.getsockname()[1], len(os.listdir("/proc/self/fd"))
        most = 0
        for i in range(200):
            source = Source(f"127.0.{1 + i // 200}.{1 + i % 200}", port, 7)
            d.directory.tell(source, m.Decline(7, (m.Named(BAIT, b"d"),), "not wanted"))
            d.agents[0].fetch(fetch(source, [i], 4, transfer=TransferId(f"own/7/{i}", 0), handle=f"bait {i}"))
            most = max(most, len(os.listdir("/proc/self/fd")) - before)
        d.over("bait 199")
        assert max(most, len(os.listdir("/proc/self/fd")) - before) <= 60
        assert _dialled(silent) >= 20, "nobody was dialled"
    p = engine({"verbs": ["read"]}, seed=1)
    honest(p, d, TransferId("own/1/after", 0))


def _dialled(listener: socket.socket) -> int:
    """Accept all connections that were made so far, also those that are closed; return how many."""
    listener.setblocking(False)
    for count in itertools.count():
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
    raise AssertionError


def _closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
