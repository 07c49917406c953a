"""The cma back end keeps the contract, straight and through shared memory, and knows whom it copies from."""

import ctypes
import mmap
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.geometry.region import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import TransferMode, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.endings import Endings
from kvxfer.testing.conformance.participant_link import Started
from kvxfer.testing.participant import LocalParticipant
from kvxfer.transport import Batch, Verb
from tests.backends.altered import altered_as
from tests.backends.conftest import world_of
from tests.conftest import require

require("cma")

from kvxfer_cma import CmaTransport, ptrace  # noqa: E402  (only where it can be used)
from kvxfer_cma.endpoint import Endpoint  # noqa: E402

VM = {"mode": "vm"}
SHM = {"mode": "shm"}


class TestDirect(ConformanceSuite):
    backend = CmaTransport
    options: ClassVar[dict[str, Any]] = VM


@pytest.mark.slow
class TestSharedMemory(ConformanceSuite):
    backend = CmaTransport
    gigabytes = False
    options: ClassVar[dict[str, Any]] = SHM


class TestEndingsInSharedMemory(Endings):
    """Of the above, what becomes of memory: the peer copies here, and what was aborted it must not copy later."""

    backend = CmaTransport
    options: ClassVar[dict[str, Any]] = SHM


CREW = {**VM, "threads": 3}
"""Every batch is copied by several threads, however small."""


@pytest.fixture(params=[VM, CREW, SHM], ids=["vm", "crew", "shm"])
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if request.param is CREW:
        monkeypatch.setattr("kvxfer.memory.pool.SHARE_BYTES", 1)
        monkeypatch.setattr("kvxfer_cma.copy.PIECE_BYTES", 4096)
    with closing(world_of("cma", **request.param)) as made:
        yield made


@pytest.fixture
def direct() -> Iterator[World]:
    with closing(world_of("cma", **VM)) as made:
        yield made


altered = partial(altered_as, Endpoint)


def error_of(world: World, participant: LocalParticipant, batch: Batch) -> str:
    [result] = world.finish(Started([(participant, participant.submit(batch))]), seconds=10)
    assert result.error is not None, "a batch that cannot succeed did"
    assert result.quiet
    return result.error


N = 1 << 16
ALL = np.array([N]), np.array([0])


def read(peer: int, remote: int = 0) -> Batch:
    return Batch(Verb.READ, peer, 0, *ALL, remote, np.array([0]))


def write(peer: int, remote: int = 0) -> Batch:
    return Batch(Verb.WRITE, peer, 0, *ALL, remote, np.array([0]))


@pytest.mark.parametrize("batch", [read, write])
def test_a_process_that_took_over_the_number_is_not_touched(direct: World, batch: Any) -> None:
    """The number that the kernel told leads to a living process that is not the peer any more."""
    a, b = direct.local(), direct.process("peer")
    stranger = direct.process("stranger")
    for participant in (a, b, stranger):
        participant.allocate([N], 1)
    link, other = direct.link(a, b), stranger.process.pid
    direct.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [N]))
    peer = link.peers[a.name]
    a.transport.links[peer].processes[0]._pid = other
    before = stranger.content(0)
    error = error_of(direct, a, batch(peer))
    assert "peer" in error and str(other) in error
    assert_equal(stranger.content(0), before, "the stranger's memory")


@pytest.mark.parametrize("batch", [read, write])
def test_what_a_peer_has_taken_back_is_not_touched(world: World, batch: Any) -> None:
    """Deregistered memory may be anything by now, though the process lives and still maps it."""
    a, b = world.local(), world.local()
    a.allocate([N], 1)
    b.allocate([N], 2)
    b.allocate([N], 3)
    link = world.link(a, b)
    memory = b._memories[0]
    b.transport.deregister(0)
    before = memory[0].get()
    error = error_of(world, a, batch(link.peers[a.name]))
    assert b.name in error
    assert_equal(memory[0].get(), before, "memory that was taken back")
    world.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [N]), memory=1)


@pytest.mark.parametrize("batch", [read, write])
def test_memory_that_is_gone_is_an_error(world: World, batch: Any) -> None:
    """A part of what the peer has registered may not be touched any more, which it told nobody: an error, and neither a crash nor
    a hang."""
    a, b = world.local(), world.local()
    a.allocate([N], 1)
    area = mmap.mmap(-1, N)
    address = np.frombuffer(area, np.uint8).ctypes.data
    b.transport.register([Region(address, N)])
    link = world.link(a, b)
    # To the kernel it is as if that were unmapped. But into a real hole this process may put something else, a new thread's frames.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + N // 2), N // 2, 0) == 0
    assert b.name in error_of(world, a, batch(link.peers[a.name]))
    half = Batch(Verb.READ, link.peers[a.name], 0, ALL[0] // 2, ALL[1], 0, np.array([0]))
    world.succeed(Started([(a, a.submit(half))]))


@pytest.mark.parametrize("batch", [read, write])
def test_memory_of_ours_that_is_gone_costs_no_later_batch(world: World, batch: Any) -> None:
    """However often: nothing that batches share is lost with one of them."""
    a, b = world.local(), world.local()
    area = mmap.mmap(-1, N)
    address = np.frombuffer(area, np.uint8).ctypes.data
    a.transport.register([Region(address, N)])
    b.allocate([N], 1)
    link = world.link(a, b)
    for rights in (0, mmap.PROT_READ | mmap.PROT_WRITE):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), N, rights) == 0
        for _ in range(10):
            started = Started([(a, a.submit(batch(link.peers[a.name])))])
            [result] = world.finish(started, seconds=10)
            assert (result.error is None) == bool(rights)


@pytest.mark.parametrize("batch", [read, write])
def test_a_peer_that_became_another_program_is_not_touched(direct: World, batch: Any) -> None:
    """After exec the process has its number and age, but not its memory."""
    a = direct.local()
    a.allocate([N], 1)
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    child = fork.Process(target=_become_another_program, args=(theirs,))
    child.start()
    try:
        mine = a.endpoint()
        peer = a.connect(mine, ours.recv_bytes())
        ours.send_bytes(mine)
        direct.succeed(Started([(a, a.submit(read(peer)))]))
        ours.send_bytes(b"go")
        exe = Path(f"/proc/{child.pid}/cmdline")
        direct.wait_for(lambda: b"time.sleep" in exe.read_bytes(), "exec")
        assert "changeling" in error_of(direct, a, batch(peer))
    finally:
        child.kill()
        child.join(30)


def _become_another_program(pipe: Connection) -> None:
    memory = np.zeros(N, np.uint8)
    transport = CmaTransport("changeling", VM)
    transport.register([Region(memory.ctypes.data, N)])
    mine = transport.endpoint()
    pipe.send_bytes(mine)
    transport.connect(mine, pipe.recv_bytes())
    while not pipe.poll(0.01):
        transport.poll()
    pipe.recv_bytes()
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize("way", [TransferMode.READ, TransferMode.WRITE])
def test_many_pieces_arrive_whichever_thread_copies_them(world: World, way: TransferMode) -> None:
    a, b = world.local(), world.other()
    for participant in (a, b):
        participant.allocate([3 << 20], 1)
    at = np.random.default_rng(0).permutation(2000) * 1536
    source, target = (b, a) if way is TransferMode.READ else (a, b)
    world.move(world.link(a, b), way, source, target, Runs.of(at, np.sort(at), np.full(2000, 1531)))


@pytest.mark.parametrize("batch", [read, write])
def test_a_number_that_the_kernel_does_not_vouch_for_any_more_is_not_believed(direct: World, batch: Any) -> None:
    """Even if whoever has it shows the right key: the process that it was told for is gone."""
    a, b = direct.local(), direct.local()
    for participant in (a, b):
        participant.allocate([N], 1)
    link = direct.link(a, b)
    direct.move(link, TransferMode.READ, b, a, Runs.of([0], [0], [N]))
    # As after its end, which the socket has not told yet.
    a.transport.links[link.peers[a.name]].liveness.process.close()
    before = b.content(0)
    assert b.name in error_of(direct, a, batch(link.peers[a.name]))
    assert_equal(b.content(0), before, "its memory")


@pytest.mark.parametrize("batch", [read, write])
def test_a_peer_that_has_hung_up_is_not_touched(world: World, batch: Any) -> None:
    a, b = world.local(), world.local()
    a.allocate([N], 1)
    b.allocate([N], 2)
    link = world.link(a, b)
    b.disconnect(link.peers[b.name])
    before = a.content(0), b.content(0)
    assert b.name in error_of(world, a, batch(link.peers[a.name]))
    assert_equal(a.content(0), before[0], "our memory")
    assert_equal(b.content(0), before[1], "the peer's memory")


def test_death_in_the_middle_of_a_copy(world: World) -> None:
    """Batches that are too large for one poll, and a peer that is killed while they run."""
    a, b = world.local(), world.mortal()
    for participant in (a, b):
        participant.allocate([96 << 20], 1)
    link = world.link(a, b)
    runs = Runs.of([0], [0], [96 << 20])
    started = [link.start(TransferMode.READ, b, a, runs) for _ in range(4)]
    world.turn()
    assert not started[0].over()
    b.kill()
    errors = [r.error for r in world.finish(*started)]
    assert all(e is not None and b.name in e for e in errors), errors


def _refused(pipe: Connection, mode: str) -> None:
    """Connect to the parent as a user who may not look into its memory, read, and tell how it went."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    memory = np.zeros(N, np.uint8)
    try:
        transport = CmaTransport("reader", {"mode": mode})
        transport.register([Region(memory.ctypes.data, N)])
        mine = transport.endpoint()
        pipe.send_bytes(mine)
        peer = transport.connect(mine, pipe.recv_bytes())
        transport.submit(read(peer))
        until = time.monotonic() + 30
        while not (ended := transport.poll()) and time.monotonic() < until:
            time.sleep(0.001)
        pipe.send((str(ended[0].error), memory.tobytes()))
    except Exception as e:
        pipe.send((str(e), b""))


@pytest.mark.parametrize("mode", ["vm", "auto"])
def test_where_the_kernel_refuses(mode: str) -> None:
    """`vm` says what to do about it; `auto` goes through shared memory."""
    libc = ctypes.CDLL(None)
    world = world_of("cma")
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    a = world.local()
    a.allocate([N], 1)
    child = fork.Process(target=_refused, args=(theirs, mode))
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: nobody without privilege may look into this process
    try:
        child.start()
        mine = a.endpoint()
        other = ours.recv_bytes()
        a.connect(mine, other)  # while the child is sure to be there: it ends with its verdict
        ours.send_bytes(mine)
        world.wait_for(lambda: ours.poll(0), "the child's verdict")
        error, found = ours.recv()
        if mode == "vm":
            assert "allow_ptrace" in error and a.name in error
        else:
            assert error == "None"
            assert found == a.content(0).tobytes()
    finally:
        libc.prctl(4, 1, 0, 0, 0)
        child.kill()
        child.join(30)
        world.close()


def test_other_hosts_and_containers_are_refused(direct: World) -> None:
    a, b = direct.local(), direct.local()
    with pytest.raises(TransportError, match=f"{b.name} runs on another host"):
        a.connect(a.endpoint(), altered(b.endpoint(), line=f"kvxfer-cma-{'0' * 32}"))
    with pytest.raises(TransportError, match="release"):
        a.connect(a.endpoint(), altered(b.endpoint(), format=99))


def test_containers_with_pid_namespaces_of_their_own_are_refused(
    direct: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says 0 for a process that has no number there. It can be tried again where that is mended."""
    a, b = direct.local(), direct.local()
    mine, theirs = a.endpoint(), b.endpoint()
    with monkeypatch.context() as patched:
        patched.setattr("kvxfer.backend.process._CREDENTIALS", _NoNumber())
        with pytest.raises(TransportError, match=f"{b.name} runs in another pid namespace.*mode: shm"):
            a.connect(mine, theirs)
    for participant in (a, b):
        participant.allocate([N], 1)
    b.connect(b.endpoint(), mine)
    a.connect(mine, theirs)


class _NoNumber:
    size = 12

    def unpack(self, said: bytes) -> tuple[int, int, int]:
        return 0, 0, 0


def test_a_peer_without_shared_memory_is_named() -> None:
    """One side only knows `vm`, the other only `shm`."""
    vm, shm, other = CmaTransport("one", VM), CmaTransport("two", SHM), CmaTransport("three", SHM)
    try:
        with pytest.raises(TransportError, match="one runs with `mode: vm`"):
            shm.connect(shm.endpoint(), vm.endpoint())
        with pytest.raises(TransportError, match="gone runs on another host"):
            shm.connect(shm.endpoint(), altered(other.endpoint(), agent="gone", line=f"kvxfer-cma-{'0' * 32}"))
    finally:
        for transport in (vm, shm, other):
            transport.close()


@pytest.mark.parametrize(
    "scope, privileged, said",
    [
        (None, False, "may read the memory of processes of user"),
        (0, False, "may read the memory of processes of user"),
        (1, False, "allow_ptrace: true"),
        (1, True, "every process"),
        (2, False, "CAP_SYS_PTRACE"),
        (3, True, "forbids"),
    ],
)
def test_probe_explains_the_rules(
    monkeypatch: pytest.MonkeyPatch, scope: int | None, privileged: bool, said: str
) -> None:
    monkeypatch.setattr(ptrace, "yama_scope", lambda: scope)
    monkeypatch.setattr(ptrace, "privileged", lambda: privileged)
    probe = CmaTransport.probe()
    assert probe.usable and said in probe.reason
    assert probe.facts["yama ptrace_scope"] == ("absent" if scope is None else str(scope))
