"""The NIXL back end keeps the contract over CMA, over TCP and in GPU memory, and what is its own besides."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry.cache import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Link, Started, Suite, Way, World
from kvxfer.testing.conformance.deaths import Deaths
from kvxfer.testing.conformance.endings import Endings
from kvxfer.testing.conformance.harness import assert_equal, overlay
from kvxfer.testing.conformance.transfers import Transfers
from kvxfer.testing.participant import LocalParticipant, Participant, Runs
from kvxfer.transport import Batch, Verb
from tests.backends.altered import altered_as
from tests.conftest import require

require("nixl")

from kvxfer_nixl import NixlTransport, flight, reach  # noqa: E402  (only where it can be used)
from kvxfer_nixl.agent import Agent  # noqa: E402
from kvxfer_nixl.endpoint import Endpoint, Piece  # noqa: E402

TCP = {"ucx": {"TLS": "tcp", "NET_DEVICES": "lo"}}
MIB = 1 << 20


class TestCma(ConformanceSuite):
    """What UCX picks by itself on one host."""

    backend = NixlTransport


@pytest.mark.slow
class TestTcp(ConformanceSuite):
    """What it picks between hosts without RDMA: writes that the peer's progress thread serves."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = TCP


@pytest.mark.gpu
class TestCuda(ConformanceSuite):
    backend = NixlTransport
    memory = "cuda"


class TestThreads(Transfers):
    """Batches that the plugin spreads over threads of its own."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"num_threads": 2, "plugin_params": {"split_batch_size": 16}}


class TestCrew(Endings, Deaths):
    """Every batch is posted by several threads, however small."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"threads": 3}

    @pytest.fixture(autouse=True)
    def shares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvxfer.memory.pool.SHARE_BYTES", 1)


class Cma(Suite):
    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"threads": 2}
    __test__ = False


class Tcp(Suite):
    """With reads, which nobody gets over TCP who does not ask for them."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {**TCP, "verbs": ["read", "write"]}
    __test__ = False


class Crewed(Suite):
    """Every batch is posted by several threads."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"threads": 3}
    __test__ = False


@pytest.fixture(params=[Cma, Tcp, Crewed], ids=["cma", "tcp", "crew"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param is Crewed:
        monkeypatch.setattr("kvxfer.memory.pool.SHARE_BYTES", 1)
    world = World(request.param())
    yield world
    world.close()


@pytest.fixture
def cma() -> Iterator[World]:
    world = World(Cma())
    yield world
    world.close()


@pytest.fixture
def tcp() -> Iterator[World]:
    world = World(Tcp())
    yield world
    world.close()


# --- pieces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "runs",
    [
        Runs.of([0], [0], [3 * MIB]),
        Runs.of([0, 2 * MIB], [MIB, 0], [2 * MIB, 70_001]),
        Runs.of(np.arange(1000) * 3000, np.arange(1000)[::-1] * 3000, np.full(1000, 2999)),
        Runs.of([5, 9, 3 * MIB - 4], [9, 5, 100], [1, 0, 5]),
    ],
    ids=["long", "long and short", "many", "few bytes"],
)
def test_batches_in_pieces_move_the_same_bytes(world: World, runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is posted piece by piece, so that no call takes long; here the pieces are small."""
    monkeypatch.setattr(flight, "PIECE_BYTES", 10_007)
    monkeypatch.setattr(flight, "PIECE_RUNS", 64)
    a, b, link = world.pair()
    for way in (Way.READ, Way.WRITE):
        world.move(link, way, a, b, runs)


def large(world: World) -> tuple[LocalParticipant, Participant, Link]:
    a, b = world.local(), world.other()
    for participant in (a, b):
        participant.allocate([8 * MIB], 1)
    return a, b, world.link(a, b)


def test_a_large_batch_is_posted_by_several_threads(cma: World, monkeypatch: pytest.MonkeyPatch) -> None:
    posted, post = list[str](), Agent.post
    monkeypatch.setattr(
        Agent, "post", lambda self, handle: (posted.append(threading.current_thread().name), post(self, handle))[1]
    )
    a, b, link = large(cma)
    runs = Runs.of(np.arange(512) * 16384, np.arange(512)[::-1] * 16384, np.full(512, 16384))
    for way in (Way.READ, Way.WRITE):
        posted.clear()
        cma.move(link, way, a, b, runs)
        assert sorted(name.startswith("kvxfer-nixl") for name in posted) == [False, True], posted
    posted.clear()
    cma.move(link, Way.READ, a, b, Runs.of([0], [0], [8 * MIB - 1]))
    assert len(posted) == 1, "a thread was woken for little"


def test_without_threads_a_batch_is_posted_by_one(cma: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, link = large(cma)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        cma.move(link, Way.READ, a, b, Runs.of([0], [0], [8 * MIB]))


def test_a_failed_piece_vouches_for_no_other(cma: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a worker of UCX's with connections of its own: that one has failed says nothing of the others."""
    broken, finished, post = list[int](), threading.Event(), Agent.post

    def done(self: Agent, handle: int) -> bool:
        if not broken:
            broken.append(handle)
            raise TransportError("the connection broke")
        return finished.is_set()

    a, b, link = large(cma)
    monkeypatch.setattr(Agent, "post", lambda self, handle: post(self, handle) and False)
    monkeypatch.setattr(Agent, "done", done)
    started = link.start(
        Way.READ, a, b, Runs.of(np.arange(512) * 16384, np.arange(512)[::-1] * 16384, np.full(512, 16384))
    )
    cma.run(5 * flight.SETTLE_S)
    assert not started.over(), "the batch has ended while a piece of it is under way"
    finished.set()
    [result] = cma.finish(started)
    assert "the connection broke" in str(result.error) and result.quiet


def test_an_aborted_batch_posts_no_more_pieces(tcp: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was posted is waited for, so the memory is quiet, and the link is as good as ever."""
    monkeypatch.setattr(flight, "PIECE_BYTES", 1_000)
    a, b, link = tcp.pair()
    before, source = b.content(0), a.content(0)
    started = link.start(Way.WRITE, a, b, Runs.of([0], [0], [3 * MIB]))
    a.abort(started.halves[0][1])
    [result] = tcp.finish(started)
    assert result.error is not None and "aborted" in result.error and b.name in result.error and result.quiet
    after = b.content(0)
    moved = np.flatnonzero(after != before)
    # Of 3,146 pieces some were posted before the abort, as many as a call has time for; most were not.
    assert not len(moved) or moved[-1] < 2 * MIB
    assert_equal(after[moved], source[moved], "what was moved")
    tcp.move(link, Way.WRITE, a, b, Runs.of([0], [0], [3 * MIB]))


# --- completion, quiet, death -----------------------------------------------------------------------------------------


def test_a_written_byte_is_there_when_we_say_so(world: World) -> None:
    """The target is another process, and hears of the completion through a pipe."""
    a, b = world.local(), world.process("target")
    world.allocate(a, b)
    link = world.link(a, b)
    for i in range(6):
        a.fill(0, seed=i)
        runs = Runs.of([0, 2 * MIB], [MIB, i], [2 * MIB, 400_000])
        expected = overlay(b.content(0), a.content(0), runs)
        world.succeed(link.start(Way.WRITE, a, b, runs))
        assert_equal(b.content(0), expected, "the target's memory")


def test_what_a_stopped_peer_still_owes_comes_before_close_and_not_after(tcp: World) -> None:
    """An aborted read from a stopped peer is not quiet, for NIXL cannot cancel it: the bytes land when the peer goes on.
    After ``close`` nothing lands."""
    a, b = tcp.local(), tcp.process("stopped")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, Way.READ, b, a, Runs.of([0], [0], [10]))
    before = a.content(0)
    b.stop()
    started = link.start(Way.READ, b, a, Runs.of([0], [0], [3 * MIB]))
    tcp.run(0.05)
    a.abort(started.halves[0][1])
    [result] = tcp.finish(started)
    assert result.error is not None and not result.quiet
    assert a.transport.capabilities.quiet == "backend_reset"
    with pytest.raises(TransportError, match="used by a batch"):
        a.transport.deregister(0)
    assert_equal(a.content(0), before, "the memory while the peer is stopped")
    a.close()
    b.resume()
    tcp.run(0.3)
    assert_equal(a.content(0), before, "the memory after close")


def test_what_a_stopped_peer_still_owes_does_land_without_close(tcp: World) -> None:
    """The same without ``close``: this is what ``quiet=False`` warns of. When the peer is done, the memory is free."""
    a, b = tcp.local(), tcp.process("stopped")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, Way.READ, b, a, Runs.of([0], [0], [10]))
    expected = a.content(0)
    b.stop()
    started = link.start(Way.READ, b, a, Runs.of([0], [0], [3 * MIB]))
    a.abort(started.halves[0][1])
    [result] = tcp.finish(started)
    assert not result.quiet
    b.resume()
    expected[: 3 * MIB] = b.content(0)[: 3 * MIB]
    tcp.wait_for(lambda: bool(np.array_equal(a.content(0), expected)), "the landing of what was aborted")
    tcp.wait_for(lambda: _gone(a), "the end of the batch inside NIXL")


def _gone(participant: LocalParticipant) -> bool:
    participant.transport.poll()
    try:
        participant.transport.deregister(0)
    except TransportError:
        return False
    return True


def test_a_killed_peer_leaves_quiet_memory(tcp: World) -> None:
    """NIXL closes the connection with the error: what was in flight from a dead peer does not land any more."""
    a, b = tcp.local(), tcp.process("killed")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, Way.READ, b, a, Runs.of([0], [0], [10]))
    started = [link.start(Way.READ, b, a, Runs.of([0], [0], [3 * MIB])) for _ in range(20)]
    b.kill()
    results = tcp.finish(*started)
    assert results[-1].error is not None and b.name in results[-1].error and "died" in results[-1].error
    assert all(r.quiet for r in results)
    a.fill(0, seed=77)
    before = a.content(0)
    tcp.run(0.3)
    assert_equal(a.content(0), before, "the memory after the end")


def test_a_peer_killed_while_two_threads_read_it(cma: World) -> None:
    """Over CMA they are inside the call at that time. The batch ends with one error, and nothing lands later."""
    a, b = cma.local(), cma.process("killed")
    for participant in (a, b):
        participant.allocate([64 * MIB], 1)
    link = cma.link(a, b)
    assert all(r.error is None for r in cma.finish(link.start(Way.READ, b, a, Runs.of([0], [0], [10]))))
    threading.Timer(0.05, b.kill).start()
    until, result = time.monotonic() + 20, None
    while result is None or result.error is None:
        assert time.monotonic() < until, "reads of a dead peer succeed"
        [result] = cma.finish(link.start(Way.READ, b, a, Runs.of([0], [0], [64 * MIB])))
    assert b.name in result.error and result.quiet
    a.fill(0, seed=77)
    before = a.content(0)
    cma.run(0.3)
    assert_equal(a.content(0), before, "the memory after the end")


def test_a_peer_that_closes_with_reads_in_flight_lives_and_so_do_we(tcp: World) -> None:
    """UCX aborts the process that serves a read over TCP when the reader's worker goes in the middle. ``close`` waits."""
    a, b = tcp.local(), tcp.process("server")
    tcp.allocate(a, b)
    c = tcp.local()
    tcp.allocate(c)
    link, other = tcp.link(a, b), tcp.link(c, b)
    for _ in range(20):
        link.start(Way.READ, b, a, Runs.of([0], [0], [3 * MIB]))
    a.close()
    tcp.move(other, Way.READ, b, c, Runs.of([0], [0], [MIB]))


def test_a_reader_is_the_danger_not_a_writer(tcp: World) -> None:
    """Why nothing but writes is offered there: over TCP a peer that was stopped survives a writer that has gone meanwhile."""
    a, b = tcp.process("writer"), tcp.process("stopped")
    tcp.allocate(a, b)
    link = tcp.link(a, b)
    tcp.move(link, Way.WRITE, a, b, Runs.of([0], [0], [10]))
    b.stop()
    for _ in range(5):
        link.start(Way.WRITE, a, b, Runs.of([0], [0], [3 * MIB]))
    a.kill()
    b.resume()
    tcp.run(0.3)
    assert len(b.content(0))


def test_verbs_can_be_left_out(tcp: World) -> None:
    a, b, link = tcp.pair()
    with closing(NixlTransport("writer", {**TCP, "verbs": ["write"]})) as transport:
        assert transport.capabilities.verbs == {Verb.WRITE}
        mine, theirs = transport.endpoint(), a.endpoint()
        memory = np.zeros(10, np.uint8)
        transport.register([Region(memory.ctypes.data, 10)])
        peer = transport.connect(mine, theirs)
        ten, zero = np.array([10]), np.array([0])
        with pytest.raises(TransportError, match="offers WRITE"):
            transport.submit(Batch(Verb.READ, peer, 0, ten, zero, 0, zero))


# --- where reads are offered ------------------------------------------------------------------------------------------


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the host's RDMA cards are looked for."""
    monkeypatch.setattr(reach, "_CARDS", tmp_path / "infiniband")
    for name in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "infiniband"


@pytest.mark.parametrize(
    "settings, card, here, elsewhere",
    [
        ({}, None, True, False),
        ({}, "mlx5_0", True, True),
        ({"TLS": "tcp"}, "mlx5_0", False, False),
        ({"TLS": "posix,tcp"}, None, False, False),
        ({"TLS": "cma,tcp"}, "mlx5_0", True, False),
        ({"TLS": "^rc,dc"}, "mlx5_0", True, False),
        ({"TLS": "^cuda_ipc"}, None, True, False),
        ({"TLS": "^sm"}, None, False, False),
        ({"TLS": "^sm"}, "mlx5_0", True, True),
        ({"TLS": "cuda,tcp"}, None, False, False),
        ({"NET_DEVICES": "lo"}, "mlx5_0", True, False),
        ({"NET_DEVICES": "lo,mlx5_0:1"}, "mlx5_0", True, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["option", "environment"])
def test_reads_are_offered_where_no_peer_has_to_help(
    settings: dict[str, str],
    card: str | None,
    here: bool,
    elsewhere: bool,
    given: str,
    cards: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if card is not None:
        (cards / card).mkdir(parents=True)
    if given == "environment":
        for name, value in settings.items():
            monkeypatch.setenv(f"UCX_{name}", value)
    options = {"listen": "0.0.0.0", **({"ucx": settings} if given == "option" else {})}
    if given == "environment":
        said = NixlTransport.probe().facts["reads"]
        assert said.startswith("none" if not here else "from any" if elsewhere else "from peers on this host")
    with closing(NixlTransport("a", options)) as a, closing(NixlTransport("b", options)) as b:
        verbs = a.capabilities.verbs
        assert verbs == ({Verb.READ, Verb.WRITE} if here else {Verb.WRITE})
        a.connect(a.endpoint(), b.endpoint())
        mine, far = a.endpoint(), altered(b.endpoint(), host="another")
        if elsewhere or Verb.READ not in verbs:
            a.connect(mine, far)
        else:
            with pytest.raises(TransportError, match=r"TCP.*peer 'b'.*\"verbs\": \[\"write\"\]"):
                a.connect(mine, far)


def test_whoever_names_the_verbs_has_decided(cards: Path) -> None:
    options = {**TCP, "verbs": ["read"]}
    with closing(NixlTransport("a", options)) as a, closing(NixlTransport("b", options)) as b:
        assert a.capabilities.verbs == {Verb.READ}
        a.connect(a.endpoint(), altered(b.endpoint(), host="another"))


def test_links_share_a_connection(world: World) -> None:
    """However many links come and go between two processes, they share what connects these: UCX does not give a socket
    back before one of the processes ends."""
    a, b, _ = world.pair()
    links = 10
    sockets = [0, 0]
    for i in range(2):
        for _ in range(links):
            link = world.link(a, b)
            world.move(link, Way.READ, a, b, Runs.of([0], [0], [100]))
            a.disconnect(link.peers[a.name])
            b.disconnect(link.peers[b.name])
        found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _open(fd)]
        sockets[i] = sum(name.startswith("socket") for name in found)
    # UCX opens a lane when it first wants it, so a few may be late; one for each link is what must not be.
    assert sockets[1] - sockets[0] < links


def _open(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")


def test_a_link_closed_before_we_connect_fails_at_once(world: World) -> None:
    a, b = world.local(), world.local()
    world.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    b.disconnect(b.connect(theirs, mine))
    world.run(0.3)
    peer = a.connect(mine, theirs)
    ten, zero = np.array([10]), np.array([0])
    started = Started([(a, a.submit(Batch(Verb.READ, peer, 0, ten, zero, 0, zero)))])
    [result] = world.finish(started, seconds=3)
    assert result.error is not None and "closed" in result.error and b.name in result.error


# --- endpoints --------------------------------------------------------------------------------------------------------


altered = partial(altered_as, Endpoint)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"format": 99}, "format 99"),
        ({"plugin": "LIBFABRIC"}, "they must agree"),
        ({"metadata": b""}, "metadata"),
        ({"metadata": b"nixlSerDes|Agent"}, "metadata"),
        ({"memories": (Piece("abacus", ((4096, 4096),)),)}, "abacus"),
        ({"memories": (Piece("cuda:x", ((4096, 4096),)),)}, "cuda"),
        ({"memories": (Piece("cpu", ((4096, 4096), (4097, 10))),)}, "overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_endpoint_is_refused(world: World, changes: dict[str, Any], said: str) -> None:
    a, b, link = world.pair()
    mine = a.endpoint()
    with pytest.raises(TransportError, match=said):
        a.connect(mine, altered(b.endpoint(), **changes))
    # Neither our endpoint nor the link that exists has suffered.
    theirs = b.endpoint()
    again = Link({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})
    for one in (link, again):
        world.move(one, Way.READ, b, a, Runs.of([0], [0], [1000]))


def test_an_endpoint_is_good_for_one_link(world: World) -> None:
    a, b = world.local(), world.local()
    mine, theirs = a.endpoint(), b.endpoint()
    a.connect(mine, theirs)
    with pytest.raises(TransportError, match="no unused endpoint"):
        a.connect(mine, b.endpoint())
    with pytest.raises(TransportError, match="in use"):
        a.connect(a.endpoint(), theirs)


def test_memory_on_two_devices_is_refused(world: World) -> None:
    transport = world.local().transport
    with pytest.raises(TransportError):
        transport.register([Region(4096, 4096), Region(1 << 40, 4096, "cuda:0")])
    assert transport.register([]) == 0, "a number was used up"


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, said",
    [
        ({"plugn": "UCX"}, "did you mean 'plugin'"),
        ({"num_threads": -1}, "num_threads"),
        ({"sync_mode": "loose"}, "sync_mode"),
        ({"threads": 2, "sync_mode": "none"}, "'threads' is 1"),
        ({"plugin": "LIBFABRIC", "threads": 2}, "plugin 'LIBFABRIC'"),
        ({"threads": 5}, "threads"),
        ({"verbs": ["send"]}, "verbs"),
        ({"verbs": []}, "verbs"),
        ({"plugin": "MOONCAKE"}, "no plugin 'MOONCAKE'.*POSIX.*source"),
        ({"plugin": "UCXX"}, "did you mean 'UCX'"),
        ({"plugin": "posix"}, "storage"),
        ({"plugin_params": {"num_worker": 2}}, "did you mean 'num_workers'"),
        ({"plugin_params": {"ucx_devices": "lo"}}, "device_list"),
        ({"plugin_params": {"engine_config": "TLS=tcp"}}, "option 'ucx'"),
        ({"plugin_params": {"ucx_error_handling_mode": "none"}}, "died"),
        ({"ucx": {"TSL": "tcp"}}, "TSL"),
        ({"ucx": {"MAX_RMA_RAILS": "many"}}, "many"),
        ({"plugin": "LIBFABRIC", "ucx": {"TLS": "tcp"}}, "for plugin 'UCX'"),
        ({"plugin": "POSIX", "num_threads": 2}, "num_threads"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        NixlTransport("agent", options)


def test_a_plugin_that_cannot_be_loaded_says_why() -> None:
    """Of those in the wheel, GDS needs libcufile, LIBFABRIC libfabric; no machine of ours has both."""
    messages = []
    for plugin in ("GDS", "LIBFABRIC", "INFINIA"):
        try:
            NixlTransport("agent", {"plugin": plugin}).close()
        except (ConfigError, TransportError) as e:
            messages.append(str(e))
    assert any("cannot be loaded here: lib" in m for m in messages), messages


def test_a_plugin_that_cannot_start_is_an_error_of_the_transport() -> None:
    with pytest.raises(TransportError, match="no_such_transport"):
        NixlTransport("agent", {"ucx": {"TLS": "no_such_transport"}})


def test_ucx_settings_with_a_list_reach_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL cuts its parameter at commas, so these go another way; the environment is as before."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    before = dict(os.environ)
    NixlTransport("agent", {"ucx": {"TLS": "cma,tcp"}}).close()
    with pytest.raises(TransportError):  # UCX: nothing here carries messages
        NixlTransport("agent", {"ucx": {"TLS": "cma"}})
    with pytest.raises(TransportError):
        NixlTransport("agent", {"ucx": {"TLS": "cma,posix", "MM_ERROR_HANDLING": False}})
    assert dict(os.environ) == before


def test_an_environment_that_contradicts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    with pytest.raises(ConfigError, match="UCX_TLS"):
        NixlTransport("agent", {"ucx": {"TLS": "all"}})
    NixlTransport("agent", {"ucx": {"TLS": "tcp"}}).close()


def test_peers_with_different_settings_understand_each_other() -> None:
    """One side with its own number of workers."""
    ends = [
        LocalParticipant(NixlTransport, o, n, "cpu")
        for n, o in (("a", {}), ("b", {"plugin_params": {"num_workers": 3}}))
    ]
    a, b = ends
    try:
        for end in ends:
            end.allocate([MIB], 1)
        mine, theirs = a.endpoint(), b.endpoint()
        peer, _ = a.connect(mine, theirs), b.connect(theirs, mine)
        number = a.submit(Batch(Verb.READ, peer, 0, np.array([MIB]), np.array([0]), 0, np.array([0])))
        until = time.monotonic() + 10
        while a.result(number) is None:
            assert time.monotonic() < until
            for end in ends:
                end.turn(True)
        result = a.result(number)
        assert result is not None and result.error is None
    finally:
        for end in ends:
            end.close()
            end.free()


# --- the process around it --------------------------------------------------------------------------------------------


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh process."""
    env = {k: v for k, v in os.environ.items() if k not in ("NIXL_LOG_LEVEL", "UCX_TLS")} | environment
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)


LOADING = """
import ctypes, logging, os, sys
import kvxfer_nixl
assert not [m for m in sys.modules if m.partition(".")[0] in ("nixl", "nixl_cu12", "nixl_cu13", "torch")]

def environment():
    table, found = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ"), []
    while table[len(found)]:
        found.append(table[len(found)])
    return sorted(found)

handler = logging.FileHandler(sys.argv[-1] if len(sys.argv) > 1 else os.environ["LOG_FILE"], mode="w")
logging.getLogger("host").addHandler(handler)
before = environment(), dict(os.environ), logging.raiseExceptions, list(logging.getLogger("nixl").handlers)
transport = kvxfer_nixl.NixlTransport("agent", {"ucx": {"TLS": "cma,tcp", "NET_DEVICES": "lo"}, "log_level": "ERROR"})
transport.endpoint()
transport.close()
assert (environment(), dict(os.environ), logging.raiseExceptions, list(logging.getLogger("nixl").handlers)) == before
logging.getLogger("host").warning("still here")
"""


def test_loading_leaves_no_trace(tmp_path: Any) -> None:
    """NIXL is loaded when a transport is made. Neither that nor the options change the environment, as Python or as C
    sees it; and the host's log files stay open (a plain ``import nixl`` closes them)."""
    log = tmp_path / "host.log"
    done = run(LOADING, LOG_FILE=str(log))
    assert done.returncode == 0, done.stderr
    assert "still here" in log.read_text()


def test_the_log_level_is_an_option() -> None:
    program = """
from kvxfer_nixl import NixlTransport
NixlTransport("agent", {"log_level": LEVEL}).close()
"""
    loud, still = (run(program.replace("LEVEL", repr(level))) for level in ("DEBUG", "ERROR"))
    assert loud.returncode == still.returncode == 0, loud.stderr + still.stderr
    assert "Created backend" in loud.stderr and "Created backend" not in still.stderr


def test_a_missing_nixl_names_the_pip_line() -> None:
    program = """
import sys
sys.modules["nixl"] = None
from kvxfer.errors import TransportError
from kvxfer_nixl import NixlTransport
probe = NixlTransport.probe()
assert not probe.usable and "pip install" in probe.reason, probe
try:
    NixlTransport("agent", {})
except TransportError as e:
    assert "pip install 'kvxfer[nixl]'" in str(e)
else:
    raise AssertionError
"""
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_probe_tells_versions_and_plugins() -> None:
    probe = NixlTransport.probe()
    assert probe.usable and "UCX" in probe.facts["plugins"] and probe.facts["nixl"].startswith("1.")
    assert probe.facts["ucx"][0].isdigit()


def test_every_error_of_nixl_has_words() -> None:
    """Its classes have no common base, and say no more than their name."""
    from kvxfer_nixl.library import load

    library = load()
    names = [n for n in vars(library.bindings) if n.startswith("nixl") and n.endswith("Error")]
    assert len(names) >= 12
    for name in names:
        kind = getattr(library.bindings, name)
        assert issubclass(kind, library.errors)
        assert len(library.explain(kind("NIXL_ERR")).split()) > 3
