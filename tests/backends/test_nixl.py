"""The NIXL back end keeps the contract over CMA, over TCP and in GPU memory; pieces, links and endpoints besides."""

# ruff: noqa: F811  (a fixture has the name of what is imported)

import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer import clock
from kvxfer.backend import CopyPool
from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.geometry.region import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.conformance import ParticipantLink, TransferMode, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.deaths import Deaths
from kvxfer.testing.conformance.endings import Endings
from kvxfer.testing.conformance.history import Histories
from kvxfer.testing.conformance.transfers import Transfers
from tests.backends.nixl_worlds import MIB, TCP, altered, cma, large, tcp, world  # noqa: F401  (fixtures)
from tests.conftest import require
from tests.descriptors import open_files

require("nixl")

from kvxfer_nixl import NixlTransport, flight  # noqa: E402  (only where it can be used)
from kvxfer_nixl.agent import LibraryAgent  # noqa: E402
from kvxfer_nixl.endpoint import Endpoint, ExportedPiece  # noqa: E402
from kvxfer_nixl.link import Peer  # noqa: E402


class TestCma(ConformanceSuite):
    """What UCX picks by itself on one host."""

    backend = NixlTransport
    revokes = False


@pytest.mark.slow
class TestTcp(ConformanceSuite):
    """What it picks between hosts without RDMA: writes that the peer's progress thread serves."""

    backend = NixlTransport
    gigabytes = False
    revokes = False
    options: ClassVar[dict[str, Any]] = TCP


@pytest.mark.gpu
class TestCuda(ConformanceSuite):
    backend = NixlTransport
    memory = "cuda"
    revokes = False


@pytest.mark.slow
class TestThreads(Transfers, Histories):
    """Batches that the plugin spreads over threads of its own."""

    backend = NixlTransport
    revokes = False
    options: ClassVar[dict[str, Any]] = {"num_threads": 2, "plugin_params": {"split_batch_size": 16}}


@pytest.mark.slow
class TestCrew(Endings, Deaths):
    """Every batch is posted by several threads, however small."""

    backend = NixlTransport
    options: ClassVar[dict[str, Any]] = {"threads": 3}

    @pytest.fixture(autouse=True)
    def shares(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvxfer.memory.pool.SHARE_BYTES", 1)


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
    for way in (TransferMode.READ, TransferMode.WRITE):
        world.move(link, way, a, b, runs)


def test_a_large_batch_is_posted_by_several_threads(cma: World, monkeypatch: pytest.MonkeyPatch) -> None:
    posted, post = list[str](), LibraryAgent.post
    monkeypatch.setattr(
        LibraryAgent,
        "post",
        lambda self, handle: (posted.append(threading.current_thread().name), post(self, handle))[1],
    )
    a, b, link = large(cma)
    runs = Runs.of(np.arange(512) * 16384, np.arange(512)[::-1] * 16384, np.full(512, 16384))
    for way in (TransferMode.READ, TransferMode.WRITE):
        posted.clear()
        cma.move(link, way, a, b, runs)
        assert sorted(name.startswith("kvxfer-nixl") for name in posted) == [False, True], posted
    posted.clear()
    cma.move(link, TransferMode.READ, a, b, Runs.of([0], [0], [8 * MIB - 1]))
    assert len(posted) == 1, "a thread was woken for little"


def test_without_threads_a_batch_is_posted_by_one(cma: World, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, link = large(cma)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        cma.move(link, TransferMode.READ, a, b, Runs.of([0], [0], [8 * MIB]))


def test_a_failed_piece_vouches_for_no_other(cma: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each thread has a worker of UCX's with connections of its own: that one has failed says nothing of the others."""
    broken, finished, post = list[int](), threading.Event(), LibraryAgent.post

    def done(self: LibraryAgent, handle: int) -> bool:
        if not broken:
            broken.append(handle)
            raise TransportError("the connection broke")
        return finished.is_set()

    a, b, link = large(cma)
    monkeypatch.setattr(LibraryAgent, "post", lambda self, handle: post(self, handle) and False)
    monkeypatch.setattr(LibraryAgent, "done", done)
    monkeypatch.setattr(flight, "GIVE_UP_S", 60.0)
    started = link.start(
        TransferMode.READ, a, b, Runs.of(np.arange(512) * 16384, np.arange(512)[::-1] * 16384, np.full(512, 16384))
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
    started = link.start(TransferMode.WRITE, a, b, Runs.of([0], [0], [3 * MIB]))
    a.abort(started.halves[0][1])
    [result] = tcp.finish(started)
    assert result.error is not None and "aborted" in result.error and b.name in result.error and result.quiet
    after = b.content(0)
    moved = np.flatnonzero(after != before)
    # Of 3,146 pieces some were posted before the abort, as many as a call has time for; most were not.
    assert not len(moved) or moved[-1] < 2 * MIB
    assert_equal(after[moved], source[moved], "what was moved")
    tcp.move(link, TransferMode.WRITE, a, b, Runs.of([0], [0], [3 * MIB]))


class Posted:
    """An agent that keeps the lengths of what is posted. Posting a byte takes ``byte_s``."""

    def __init__(self, byte_s: float) -> None:
        self.byte_s, self.name, self.sizes = byte_s, "peer", list[int]()

    def prepare(self, operation: str, here: Any, there: Any, name: str) -> int:
        self.sizes.append(int(here[1][:, 1].sum()))
        return len(self.sizes)

    def post(self, handle: int) -> bool:
        time.sleep(self.byte_s * self.sizes[-1])
        return True

    def release(self, handle: int) -> None:
        pass


@pytest.mark.parametrize("byte_s", [0.0, 1e-9], ids=["queued", "copied"])
def test_gpu_memory_is_posted_whole_unless_that_copies_it(byte_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between agents of one GPU posting may copy, at less than a gigabyte a second: a call must not take seconds."""
    monkeypatch.setattr(clock, "now", thread_clock)  # a host that stands still meanwhile has not copied
    agent, rows = Posted(byte_s), np.array([[0, 64 * MIB, 0], [64 * MIB, 8 * MIB, 0]], np.uint64)
    link: Any = SimpleNamespace(peer=Peer("peer", False, agent), broken=None, up=True)  # type: ignore[arg-type]
    for number in range(2):
        agent.sizes.clear()
        one = flight.Flight(number, "write", link, (True, rows), (True, rows), None, CopyPool(1, "posts"))
        while (end := one.advance(time.monotonic(), time.monotonic() + 1.0)) is None:
            pass
        assert end.error is None and sum(agent.sizes) == 72 * MIB
        whole = number and not byte_s
        assert (agent.sizes == [72 * MIB]) if whole else max(agent.sizes) <= flight.PIECE_BYTES


# --- links ------------------------------------------------------------------------------------------------------------


def test_links_share_a_connection(world: World) -> None:
    """However many links come and go between two processes, they share what connects these: UCX does not give a socket
    back before one of the processes ends."""
    a, b, _ = world.pair()
    links = 10
    sockets = [0, 0]
    for i in range(2):
        for _ in range(links):
            link = world.link(a, b)
            world.move(link, TransferMode.READ, a, b, Runs.of([0], [0], [100]))
            a.disconnect(link.peers[a.name])
            b.disconnect(link.peers[b.name])
        sockets[i] = sum(name.startswith("socket:") for name in open_files())
    # UCX opens a lane when it first wants it, so a few may be late; one for each link is what must not be.
    assert sockets[1] - sockets[0] < links


# --- endpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"format": 99}, "format 99"),
        ({"plugin": "LIBFABRIC"}, "they must agree"),
        ({"memories": (ExportedPiece("abacus", ((4096, 4096),)),)}, "abacus"),
        ({"memories": (ExportedPiece("cuda:x", ((4096, 4096),)),)}, "cuda"),
        ({"memories": (ExportedPiece("cpu", ((4096, 4096), (4097, 10))),)}, "overlap"),
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
    again = ParticipantLink({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})
    for one in (link, again):
        world.move(one, TransferMode.READ, b, a, Runs.of([0], [0], [1000]))


@pytest.mark.parametrize(("metadata", "said"), [(b"", "no network"), (b"nixlSerDes|Agent", "metadata")])
def test_wrong_metadata_are_refused(tcp: World, metadata: bytes, said: str) -> None:
    a, b, link = tcp.pair()
    with pytest.raises(TransportError, match=said):
        a.connect(a.endpoint(), altered(b.endpoint(), metadata=metadata))
    tcp.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [1000]))


def test_the_metadata_of_this_side_itself_are_refused(tcp: World) -> None:
    """NIXL would move bytes within this process, wherever the peer says."""
    a, b, link = tcp.pair()
    own = Endpoint.decode(a.endpoint()).metadata
    with pytest.raises(TransportError, match="cannot connect to peer"):
        a.connect(a.endpoint(), altered(b.endpoint(), metadata=own))
    tcp.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [1000]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_peer_that_takes_the_name_of_another_keeps_it_from_nothing(tcp: World, when: str) -> None:
    """NIXL knows agents by the names that they give themselves, and takes no second one of a name."""
    a, victim, thief = tcp.local(), tcp.local(), tcp.local()
    tcp.allocate(a, victim, thief)
    known = [tcp.link(a, victim)] if when == "after" else []
    name, its = (Endpoint.decode(one.endpoint()).metadata for one in (victim, thief))
    at, size = 24, 8  # where the name begins, and the bytes of its length before that
    ends = [at + int.from_bytes(each[at - size : at], "little") for each in (name, its)]
    forged = name[: ends[0]] + its[ends[1] :]
    mine, theirs = a.endpoint(), thief.endpoint()
    a.connect(mine, altered(theirs, metadata=forged))
    thief.connect(theirs, mine)
    for link in (*known, tcp.link(a, victim)):
        tcp.move(link, TransferMode.READ, victim, a, Runs.of([0], [0], [1000]))
        tcp.move(link, TransferMode.WRITE, a, victim, Runs.of([0], [0], [1000]))


@pytest.mark.parametrize("early", ["reader", "owner"])
def test_a_peer_that_greets_before_it_was_chosen_is_greeted_too(cma: World, early: str) -> None:
    """One side may have settled how the two meet, and said so, before the other has looked."""
    a, b = cma.local(), cma.local()
    cma.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})
    first = a if early == "reader" else b
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        first.turn(True)
    cma.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [1000]))


def test_memory_on_two_devices_is_refused(world: World) -> None:
    transport = world.local().transport
    with pytest.raises(TransportError):
        transport.register([Region(4096, 4096), Region(1 << 40, 4096, "cuda:0")])
    assert transport.register([]) == 0, "a number was used up"
