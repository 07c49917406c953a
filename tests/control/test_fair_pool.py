"""Jobs that take as long as a peer likes, such as looking up the names that it names, keep its own jobs waiting and no other's."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvxfer.failures import Failure, FailureKind
from kvxfer.fair_pool import FairPool
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.testing.engine import PagedMemory
from tests.control.conftest import fetch, until
from tests.control.stranger import served
from tests.control.test_strangers import honest

T = TransferId("own/1/bait", 0)


def test_an_owner_whose_jobs_do_not_end_takes_no_other_s_turn() -> None:
    done: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
    over, begun, ended = threading.Event(), list[str](), list[object]()
    pool = FairPool("test", 4, 20, done.put)

    def slow(name: str) -> None:
        begun.append(name)
        over.wait(100.0)

    taken = sum(pool.submit("greedy", lambda: slow("greedy"), ended.append) for _ in range(20))
    until(lambda: len(begun) == 3)
    assert taken == 15, "three quarters of the room"
    assert pool.submit("other", lambda: 7, ended.append)
    done.get(timeout=30.0)()
    assert ended == [7]
    assert pool.submit("another", lambda: int("x"), ended.append)
    done.get(timeout=30.0)()
    assert isinstance(ended[1], Failure) and begun == ["greedy"] * 3
    over.set()
    for _ in range(taken):
        done.get(timeout=30.0)()
    assert len(begun) == taken
    pool.close(5.0)
    assert not pool.submit("other", lambda: 7, ended.append)


@pytest.mark.parametrize("directory", ["names them", "is one"])
def test_names_that_take_long_to_look_up_keep_no_other_load_waiting(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    """And the load that names them says what it waits for."""
    found, over = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *how: Any, **more: Any) -> Any:
        if host.endswith(".example"):
            over.wait(100.0)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return found(host, *how, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    times = {"peer_timeout": 4.0}
    p, d = engine({"verbs": ["read"]}, seed=1, advertise="localhost", **times), engine({"verbs": ["read"]}, **times)
    caches = PagedMemory(ranks=4).caches
    backends = d.agents[0].descriptor.backends
    ranks = tuple(m.RankDescriptor(f"tcp://r{n}.example:1", n, cache, backends) for n, cache in enumerate(caches))
    said = m.EngineDescriptor(m.PROTOCOL, "liar", 77, ranks)
    with served(lambda asked: said if isinstance(asked, m.Lookup) else None) as port:
        source = Source("127.0.0.1", port, 77) if directory == "names them" else Source("d.example", 1, 77)
        d.agents[0].fetch(fetch(source, [6], 4, transfer=T, handle="bait"))
        honest(p, d, TransferId("own/1/beside", 0))  # whose engine has names for addresses, too
        end = d.over("bait")
    over.set()
    assert end.outcome.kind is FailureKind.PEER_UNREACHABLE
    assert "its host's name has not been looked up yet" in str(end.outcome.failure), end


@pytest.mark.parametrize("backend", ["tcp", "zmq"])
def test_a_host_whose_back_ends_claim_many_names_has_the_turn_of_one(
    engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """What an endpoint says of its agent is only a claim."""
    found, over, sought = socket.getaddrinfo, threading.Event(), list[str]()

    def getaddrinfo(host: str, *how: Any, **more: Any) -> Any:
        if host.endswith(".example") and not more.get("flags", 0) & socket.AI_NUMERICHOST:
            sought.append(host)
            over.wait(100.0)
            raise socket.gaierror(socket.EAI_AGAIN, "no name server answers")
        return found(host, *how, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("kvxfer.backend.names.LOOKUPS", 4)
    made = {"backend": backend, "listen": "127.0.0.1"}
    p, d = engine({**made, "advertise": "localhost"}, seed=1), engine(dict(made))
    liars = [engine({**made, "advertise": f"h{n}.example"}, seed=1, listen="127.0.0.2") for n in range(6)]
    for n, liar in enumerate(liars):
        d.agents[0].fetch(fetch(liar.source, [6 + n], 4, transfer=T, handle=f"bait{n}"))
    until(lambda: len(sought) >= 3)
    until(lambda: len(d.agents[0].links()) == len(liars))
    honest(p, d, TransferId("own/1/beside", 0))
    over.set()
