"""A directory names ranks as it likes: what it says costs the load that asked it, not this engine's descriptors or time."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress

import numpy as np
import pytest
from msgspec.structs import replace

from kvxfer.control import outbound
from kvxfer.control.resolver import KEPT_S, PROBE_S, Resolver
from kvxfer.control.sockets import ControlSockets
from kvxfer.failures import FailureKind
from kvxfer.geometry import Cache, Rank
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from kvxfer.security import OPEN
from tests.control.conftest import SeededEngine, fetch, offered, until, works
from tests.control.stranger import served

K = FailureKind
BAIT = TransferId("own/1/bait", 0)


@contextmanager
def liar(like: SeededEngine, ranks: int) -> Iterator[Source]:
    """A directory that describes so many ranks like that of an engine, none of which answers a hello."""
    (rank,) = (agent.descriptor for agent in like.agents)
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as hole:
        where = f"tcp://127.0.0.1:{hole.getsockname()[1]}"
        each = tuple(
            replace(rank, address=where, epoch=pp + 1, cache=replace(rank.cache, rank=Rank(pp, 0)))
            for pp in range(ranks)
        )
        lie = m.EngineDescriptor(m.PROTOCOL, "liar", 1, each)
        with served(lambda asked: lie if isinstance(asked, m.Lookup) else None) as port:
            yield Source("127.0.0.1", port, 1)


@pytest.fixture
def pair(engine) -> tuple[SeededEngine, SeededEngine]:
    calm = {"transfer_timeout": 20.0, "peer_timeout": 4.0}
    return engine({"verbs": ["read"]}, seed=1, **calm), engine({"verbs": ["read"]}, **calm)


@pytest.mark.parametrize(
    ("ranks", "why"),
    [(3000, f"describes 3000 ranks; at most {m.MAX_RANKS}"), (300, "would have to read from 300 ranks")],
)
def test_an_engine_of_too_many_ranks_is_refused_by_name(
    pair: tuple[SeededEngine, SeededEngine], ranks: int, why: str
) -> None:
    p, d = pair
    works(p, d)
    before = len(os.listdir("/proc/self/fd"))
    with liar(p, ranks) as source:
        d.agents[0].fetch(fetch(source, [6], 4, transfer=BAIT, handle="bait"))
        end = d.over("bait")
    assert end.outcome.kind is K.INCOMPATIBLE and why in str(end.outcome.failure), end
    assert len(os.listdir("/proc/self/fd")) < before + 16
    works(p, d)


def sockets() -> set[str]:
    """Return the sockets of this process, by inode: what earlier tests have left may be closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {name for name in found if name.startswith("socket:")}


def test_the_ranks_of_one_engine_are_dialled_a_few_at_a_time(pair: tuple[SeededEngine, SeededEngine]) -> None:
    p, d = pair
    works(p, d)
    before = sockets()
    with liar(p, 200) as source:
        d.agents[0].fetch(fetch(source, [6], 4, transfer=BAIT, handle="bait"))
        most = 0
        until(lambda: len(sockets() - before) >= outbound.AT_ONCE, 30.0)
        for _ in range(10):
            most = max(most, len(sockets() - before))
            works(p, d)
        assert most < outbound.AT_ONCE + 8
        end = d.over("bait")
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
    works(p, d)
    monkeypatch.setattr(d.agents[0]._loop.sockets.policy, "dialled", 0)
    d.agents[0].fetch(fetch(other.source, [6], 4, transfer=BAIT, handle="bait"))
    end = d.over("bait")
    assert end.outcome.kind is K.OVERLOADED and "ulimit -n" in str(end.outcome.failure), end
    works(p, d)


def test_who_connects_when_descriptors_are_short_takes_the_place_of_the_silent(
    engine: Callable[..., SeededEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = engine({"verbs": ["read"]}, seed=1)
    for sockets in (p.directory._sockets, p.agents[0]._loop.sockets):
        monkeypatch.setattr(sockets.policy, "accepted", 0)
    with ExitStack() as stack:
        where = (p.source.host, p.source.port)
        silent = [stack.enter_context(socket.create_connection(where)) for _ in range(40)]
        until(lambda: _closed(silent[0]))
        works(p, engine({"verbs": ["read"]}))
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
    works(p, d)


def test_what_one_directory_says_of_a_rank_is_not_believed_for_the_fetches_of_another(engine) -> None:
    """They had shared the link to that rank, over which whoever came first had said where its layers are."""
    options = {"verbs": ["read"], "run_bytes": 1}  # straight out of its cache
    p, d = engine(dict(options), seed=1), engine(dict(options))
    rank = p.agents[0].descriptor
    (view,) = rank.cache.views
    false = replace(rank, cache=replace(rank.cache, views=(replace(view, offsets=view.offsets[::-1]),)))
    liar = m.EngineDescriptor(m.PROTOCOL, "liar", 77, (false,))
    with served(lambda asked: liar if isinstance(asked, m.Lookup) else None) as port:
        d.agents[0].prepare(Source("127.0.0.1", port, 77))
        until(lambda: any(link.up for link in d.agents[0].links()))
        transfer = TransferId("own/1/honest", 0)
        p.agents[0].offer(offered([3], 4, transfer=transfer))
        d.agents[0].fetch(fetch(p.source, [5], 4, transfer=transfer, handle="honest"))
        (end,) = d.wait(Ended)
    assert end.outcome.delivered, end
    assert np.array_equal(d.block(5), p.block(3)), "delivered, with other bytes than were offered"


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


def test_a_silent_directory_is_asked_until_nobody_has_wanted_it_for_long() -> None:
    """What it is asked with takes a connection, and a place among the sources."""
    with socket.create_server(("127.0.0.1", 0)) as silent, closing(ControlSockets(OPEN)) as hub:
        source = Source("127.0.0.1", silent.getsockname()[1], 0)
        me = m.RankDescriptor("tcp://127.0.0.1:1", 1, Cache((), (), ()), ())
        resolver = Resolver(hub, me, 1.0, {}, lambda *_: pytest.fail("nothing was answered"))
        assert resolver.ask(source, None, 0.0) is None
        last, said, wanted = 0.0, [], False
        while (now := resolver.next_tick()) is not None and now < 3 * KEPT_S:
            last = now
            said += [failure.kind for _, failure in resolver.tick(now)]
            if not wanted and now >= KEPT_S / 2:
                wanted, failure = True, resolver.ask(source, None, now)
                assert failure is not None and "and has not since" in failure.detail
        assert said == [K.PEER_UNREACHABLE] and 1.5 * KEPT_S <= last <= 1.5 * KEPT_S + 2 * PROBE_S
