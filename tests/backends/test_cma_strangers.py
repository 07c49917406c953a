"""Strangers at the ring of shared memory that the cma back end answers requests from."""

import fcntl
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvxfer.backend.door import MAX_STRANGERS
from kvxfer.testing.conformance import Suite, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.participant import LocalParticipant
from tests.conftest import require
from tests.descriptors import open_files, sockets

require("cma")

from kvxfer_cma import CmaTransport, ring  # noqa: E402  (only where it can be used)
from kvxfer_cma.endpoint import Endpoint  # noqa: E402

N = 1 << 16


class Shared(Suite):
    backend = CmaTransport
    options: ClassVar[dict[str, Any]] = {"mode": "shm"}
    __test__ = False


@pytest.fixture
def shared() -> Iterator[World]:
    world = World(Shared())
    yield world
    world.close()


class Stranger:
    """Speaks to a transport's socket, knowing or not knowing a link; everything else is up to the test."""

    def __init__(self, victim: LocalParticipant, link: bytes, sealed: bool = True, size: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(5)
        self.socket.connect(f"\0{Endpoint.decode(victim.endpoint()).socket}")
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        whole = ring.SLOTS * ring.SLOT_BYTES
        os.ftruncate(fd, whole if size is None else size)
        self.memory = mmap.mmap(fd, whole if size is None else size)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(self.socket, [link], [fd])
        os.close(fd)

    def ask(self, world: World, runs: list[tuple[int, int]], request: tuple[int, int, int, int]) -> bytes:
        """What comes back; nothing when the other side hangs up."""
        table = b"".join(struct.pack("<qq", *run) for run in runs)
        self.memory[:8] = struct.pack("<q", 1)
        self.memory[ring.HEAD_BYTES : ring.HEAD_BYTES + len(table)] = table
        try:
            self.socket.send(ring.REQUEST.pack(*request, 1))
        except BrokenPipeError:
            return b""
        world.run(0.05)
        try:
            return self.socket.recv(64)
        except ConnectionResetError:
            return b""


@pytest.fixture
def victim(shared: World) -> tuple[LocalParticipant, bytes]:
    """A participant, and a link that it has offered and opened."""
    a, b = shared.local(), shared.local()
    a.allocate([N], 1)
    mine, theirs = a.endpoint(), b.endpoint()
    a.connect(mine, theirs)
    return a, Endpoint.decode(mine).link


@pytest.mark.parametrize(
    "runs, asked",
    [
        ([(0, N + 1)], (0, 0, 0, 1)),
        ([(-8, 8)], (0, 0, 0, 1)),
        ([(8, -8)], (0, 1, 0, 1)),
        ([(1 << 62, 8)], (0, 1, 0, 1)),
        ([(0, 8)], (0, 0, 7, 1)),
        ([(0, N)] * 100, (0, 0, 0, 100)),
        ([(0, 8)], (99, 0, 0, 1)),
        ([(0, 8)], (0, 0, 0, 1 << 30)),
    ],
)
def test_requests_outside_are_refused(
    shared: World, victim: tuple[LocalParticipant, bytes], runs: list[tuple[int, int]], asked: tuple[int, int, int, int]
) -> None:
    """Too long, before the beginning, of negative length, far off, of unknown memory, more than a slot holds, for a
    slot that is not there, too many."""
    participant, link = victim
    before = participant.content(0)
    answer = Stranger(participant, link).ask(shared, runs, asked)
    assert answer == b"" or struct.unpack("<II", answer)[1] != 0
    assert_equal(participant.content(0), before, "the victim's memory")


def test_requests_inside_are_answered(shared: World, victim: tuple[LocalParticipant, bytes]) -> None:
    """What the tests around break: so that they fail for the reason they name."""
    participant, link = victim
    stranger = Stranger(participant, link)
    assert struct.unpack("<II", stranger.ask(shared, [(16, 8)], (0, 0, 0, 1))) == (0, 0)
    assert participant.content(0)[16:24].tobytes() in bytes(stranger.memory)


def test_a_link_whose_socket_alone_has_died_is_lost(shared: World) -> None:
    """Both processes live, so that nothing else would tell: the link would fail all batches and never be made anew."""
    a, b = shared.local(), shared.local()
    shared.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    a.connect(mine, theirs)
    peer = b.connect(theirs, mine)
    shared.run(0.05)
    assert b.transport.lost(peer) is None
    taken = Stranger(a, Endpoint.decode(mine).link)  # takes the place of b
    shared.run(0.05)
    assert b.transport.lost(peer) is not None
    taken.socket.close()


def test_a_request_that_was_given_up_is_not_served(shared: World, victim: tuple[LocalParticipant, bytes]) -> None:
    """Whoever stood still meanwhile must not write into memory that is another request's by now."""
    participant, link = victim
    before = participant.content(0)
    stranger = Stranger(participant, link)
    table = struct.pack("<qq", 16, 8)
    stranger.memory[ring.HEAD_BYTES : ring.HEAD_BYTES + len(table)] = table
    stranger.socket.send(ring.REQUEST.pack(0, 1, 0, 1, 5))
    shared.run(0.05)
    assert struct.unpack("<II", stranger.socket.recv(64)) == (0, ring.GIVEN_UP)
    assert_equal(participant.content(0), before, "the victim's memory")


@pytest.mark.parametrize("number", [0, -1, -(1 << 63), (1 << 63) - 1])
def test_any_number_of_a_request_is_borne(shared: World, victim: tuple[LocalParticipant, bytes], number: int) -> None:
    """Whatever eight bytes a peer sends as a number cost it an answer, and its victim nothing."""
    participant, link = victim
    stranger = Stranger(participant, link)
    stranger.socket.send(struct.pack("<IIII", 0, 0, 0, 1) + struct.pack("<q", number))
    shared.run(0.05)
    slot, status = struct.unpack("<II", stranger.socket.recv(64))
    assert slot == 0 and (status == ring.GIVEN_UP or number == 0)
    stranger.memory[:8] = struct.pack("<q", 1)
    assert struct.unpack("<II", Stranger(participant, link).ask(shared, [(16, 8)], (0, 0, 0, 1))) == (0, 0)


def test_strangers_are_hung_up_on(shared: World, victim: tuple[LocalParticipant, bytes]) -> None:
    participant, link = victim
    for stranger in (
        Stranger(participant, b"x" * 16),
        Stranger(participant, b""),
        Stranger(participant, link, sealed=False),
        Stranger(participant, link, size=4096),
    ):
        assert stranger.ask(shared, [(0, 8)], (0, 0, 0, 1)) == b""


def test_strangers_take_a_bounded_number_of_descriptors(shared: World, victim: tuple[LocalParticipant, bytes]) -> None:
    """Those who say nothing, and those who name the same link again and again."""
    participant, link = victim
    name = Endpoint.decode(participant.endpoint()).socket
    before = open_files().count("/memfd:test (deleted)")
    silent = []
    for _ in range(MAX_STRANGERS + 50):
        silent.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        silent[-1].connect(f"\0{name}")
        shared.turn(0)
    named = [Stranger(participant, link) for _ in range(20)]
    assert struct.unpack("<II", named[-1].ask(shared, [(16, 8)], (0, 0, 0, 1))) == (
        0,
        0,
    )  # the last: all have been heard
    taken, maps = (
        sum(s.getsockname() == b"\0" + name.encode() for s in sockets()),
        open_files().count("/memfd:test (deleted)"),
    )
    assert MAX_STRANGERS // 2 < taken <= 1 + 1 + MAX_STRANGERS, (
        "its door, who named the link last, and who says nothing"
    )
    assert maps - before == len(named) + 1, "of what the victim has mapped, only the last is left"
    for stranger in silent:
        stranger.close()
