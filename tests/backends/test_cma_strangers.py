"""A peer that breaks the rules of the shared memory through which the cma back end copies."""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kvxfer.backend import LivenessLinks, Wakeup
from kvxfer.backend.endpoint import new_token
from kvxfer.testing.conformance import World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.participant import LocalParticipant
from tests.backends.conftest import world_of
from tests.conftest import require
from tests.descriptors import open_files

require("cma")

from kvxfer_cma import ring  # noqa: E402  (only where it can be used)
from kvxfer_cma.endpoint import Endpoint  # noqa: E402

N = 1 << 16


@pytest.fixture
def shared() -> Iterator[World]:
    with closing(world_of("cma", mode="shm")) as made:
        yield made


class Stranger:
    """The peer of a link; what it says over the link's socket is up to the test."""

    def __init__(self, world: World, victim: LocalParticipant, sealed: bool = True, size: int | None = None) -> None:
        self.world, self.wakeup = world, Wakeup()
        self.lines = LivenessLinks("cma", self.wakeup)
        mine, theirs = Endpoint("a stranger", new_token(), self.lines.name, True), victim.endpoint()
        self.lines.offer(mine.link)
        self.victim, self.link = victim, victim.connect(theirs, mine.encode())
        there = Endpoint.decode(theirs)
        self.line = self.lines.connect(mine.link, there.link, there.line, there.agent)
        whole = ring.SLOTS * ring.SLOT_BYTES
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, whole if size is None else size)
        self.memory = mmap.mmap(fd, whole if size is None else size)
        if sealed:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.line.tell(ring.LEND, fd)
        os.close(fd)

    def say(self, message: bytes) -> bytes:
        """What comes back; nothing when the other side hangs up."""
        try:
            self.line.tell(message)
        except OSError:
            return b""
        answers: list[bytes] = []

        def answered() -> bool:
            self.lines.handle(self.wakeup.clear())
            while self.line.heard:
                said, descriptors = self.line.heard.popleft()
                for descriptor in descriptors:
                    os.close(descriptor)
                if said.startswith(ring.ANSWERED):
                    answers.append(said[1:])
            return bool(answers) or self.line.down is not None

        self.world.wait_for(answered, "an answer, or the end of the link")
        return answers[0] if answers else b""

    def ask(self, runs: list[tuple[int, int]], request: tuple[int, int, int, int]) -> bytes:
        table = b"".join(struct.pack("<qq", *run) for run in runs)
        self.memory[:8] = struct.pack("<q", 1)
        self.memory[ring.HEAD_BYTES : ring.HEAD_BYTES + len(table)] = table
        return self.say(ring.ASK + ring.REQUEST.pack(*request, 1))

    def close(self) -> None:
        self.lines.close()
        self.wakeup.close()


@pytest.fixture
def victim(shared: World) -> LocalParticipant:
    participant = shared.local()
    participant.allocate([N], 1)
    return participant


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
    shared: World, victim: LocalParticipant, runs: list[tuple[int, int]], asked: tuple[int, int, int, int]
) -> None:
    """Too long, before the beginning, of negative length, far off, of unknown memory, more than a slot holds, for a
    slot that is not there, too many."""
    before, stranger = victim.content(0), Stranger(shared, victim)
    answer = stranger.ask(runs, asked)
    assert answer == b"" or struct.unpack("<II", answer)[1] != 0
    assert_equal(victim.content(0), before, "the victim's memory")
    stranger.close()


def test_requests_inside_are_answered(shared: World, victim: LocalParticipant) -> None:
    """What the tests around break: so that they fail for the reason they name."""
    stranger = Stranger(shared, victim)
    assert struct.unpack("<II", stranger.ask([(16, 8)], (0, 0, 0, 1))) == (0, 0)
    assert victim.content(0)[16:24].tobytes() in bytes(stranger.memory)
    stranger.close()


def test_a_request_that_was_given_up_is_not_served(shared: World, victim: LocalParticipant) -> None:
    """Whoever stood still meanwhile must not write into memory that is another request's by now."""
    before, stranger = victim.content(0), Stranger(shared, victim)
    table = struct.pack("<qq", 16, 8)
    stranger.memory[ring.HEAD_BYTES : ring.HEAD_BYTES + len(table)] = table
    answer = stranger.say(ring.ASK + ring.REQUEST.pack(0, 1, 0, 1, 5))
    assert struct.unpack("<II", answer) == (0, ring.GIVEN_UP)
    assert_equal(victim.content(0), before, "the victim's memory")
    stranger.close()


@pytest.mark.parametrize("number", [0, -1, -(1 << 63), (1 << 63) - 1])
def test_any_number_of_a_request_is_borne(shared: World, victim: LocalParticipant, number: int) -> None:
    """Whatever eight bytes a peer sends as a number cost it an answer, and its victim nothing."""
    stranger = Stranger(shared, victim)
    slot, status = struct.unpack("<II", stranger.say(ring.ASK + struct.pack("<IIIIq", 0, 0, 0, 1, number)))
    assert slot == 0 and (status == ring.GIVEN_UP or number == 0)
    assert struct.unpack("<II", stranger.ask([(16, 8)], (0, 0, 0, 1))) == (0, 0)
    stranger.close()


@pytest.mark.parametrize("wrong", [{"sealed": False}, {"size": 4096}, {}], ids=str)
def test_a_peer_that_breaks_the_rules_is_hung_up_on(
    shared: World, victim: LocalParticipant, wrong: dict[str, Any]
) -> None:
    """Other shared memory than agreed, and slots sent twice. Nothing of it is kept."""
    before, stranger = open_files().count("/memfd:test (deleted)"), Stranger(shared, victim, **wrong)
    if not wrong:
        with open("/proc/self/exe", "rb") as file:
            stranger.line.tell(ring.LEND, file.fileno())
    shared.run(0.05)
    assert stranger.ask([(0, 8)], (0, 0, 0, 1)) == b""
    assert victim.transport.lost(stranger.link) is not None
    victim.disconnect(stranger.link)
    stranger.memory.close()
    shared.run(0.05)
    assert open_files().count("/memfd:test (deleted)") == before
    stranger.close()


def test_a_peer_of_another_control_connection_is_served_nothing(shared: World) -> None:
    """Its endpoint was passed on by the one that this side has its connection with."""
    a, b = shared.local(), shared.local()
    shared.allocate(a, b)
    mine, theirs = a.endpoint(), b.endpoint()
    links = a.transport.connect_over(mine, theirs, b"one"), b.transport.connect_over(theirs, mine, b"two")
    shared.run(0.1)
    assert a.transport.lost(links[0]) is not None and b.transport.lost(links[1]) is not None


def test_a_peer_that_says_it_belongs_to_another_control_connection_is_lost_at_once(
    shared: World, victim: LocalParticipant
) -> None:
    """And it keeps its own sockets open, so that nothing else tells of it."""
    wakeup = Wakeup()
    lines = LivenessLinks("cma", wakeup)
    mine, theirs = Endpoint("a stranger", new_token(), lines.name, True), victim.endpoint()
    lines.offer(mine.link)
    link = victim.transport.connect_over(theirs, mine.encode(), b"one")
    there = Endpoint.decode(theirs)
    lines.connect(mine.link, there.link, there.line, there.agent, b"two")
    shared.run(0.05)
    lost = victim.transport.lost(link)
    assert lost is not None and "control connection" in lost.detail
    lines.close()
    wakeup.close()
