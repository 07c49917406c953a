"""The tcp back end keeps the contract, and stands up to strangers and bad peers."""

import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any, ClassVar

import numpy as np
import pytest

from kvxfer.backend.endpoint import new_token
from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Started, TransferMode, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.participant import LocalParticipant
from kvxfer.transport import Batch, Verb
from kvxfer_tcp import TcpTransport
from kvxfer_tcp.connection import SHARED_UNSENT
from kvxfer_tcp.door import STRANGERS
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.read import ASK_RUNS, MAX_CHUNK, MIN_CHUNK, OPEN_ASKS
from kvxfer_tcp.vectors import IovecTable
from kvxfer_tcp.wire import FRAME_BYTES, GREETING_BYTES, Header, Kind, greeting
from tests.backends.conftest import world_of
from tests.descriptors import sockets
from tests.ports import NOBODY

NODELAY, KEEPALIVE = (socket.IPPROTO_TCP, socket.TCP_NODELAY), (socket.SOL_SOCKET, socket.SO_KEEPALIVE)
BACKEND = "tcp"
UNSENT = (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


class TestOne(ConformanceSuite):
    backend = TcpTransport
    rounds = 1000


@pytest.mark.slow
class TestSeveral(ConformanceSuite):
    backend = TcpTransport
    gigabytes = False
    options: ClassVar[dict[str, Any]] = {"connections": 3}


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 1 << 20])
def test_chunks_hold_the_runs_in_order(chunk: int) -> None:
    """Each byte of the runs is in one row, in order, and each chunk between two spare rows."""
    dice = np.random.default_rng(chunk)
    lengths = dice.integers(1, 50, 40)
    addresses = 1000 + np.cumsum(lengths + dice.integers(0, 2, 40) * 5) - lengths  # some follow each other
    table = IovecTable(addresses, lengths, chunk)
    wanted = [a + i for a, n in zip(addresses.tolist(), lengths.tolist(), strict=True) for i in range(n)]
    found: list[int] = []
    for number in range(table.chunks):
        rows = table.rows[table.spare[number] + 1 : table.spare[number + 1]]
        assert int(rows[:, 1].sum()) == table.chunk_bytes(number) and (rows[:, 1] > 0).all()
        found += [a + i for a, n in rows.tolist() for i in range(n)]
    assert found == wanted and table.nbytes == len(wanted)


def test_more_runs_than_one_request_takes(world: World) -> None:
    """They are asked for bit by bit, and all arrive; so does what is asked for after that."""
    count = ASK_RUNS * (OPEN_ASKS + 2)
    a, b = world.local(), world.local()
    for participant in (a, b):
        participant.allocate([2 * count], seed=len(participant.name))
    b.fill(0, seed=77)
    link = world.link(a, b)
    src = np.random.default_rng(1).permutation(count) * 2
    world.move(link, TransferMode.READ, a, b, Runs.of(src, np.arange(count) * 2, np.ones(count, np.int64)))
    world.move(link, TransferMode.READ, a, b, Runs.of([1], [5], [1000]))


def test_a_large_batch_leaves_other_links_their_turns(world: World) -> None:
    """While half a gigabyte is under way on one link, dozens of small batches go to and fro on another, one after the other."""
    a, b, nbytes = world.local(), world.local(), 512 << 20
    for participant in (a, b):
        participant.allocate_repeating(nbytes)
        participant.allocate([100_000], 7)
    busy, other = world.link(a, b), world.link(a, b)
    for link in (busy, other):
        world.succeed(link.start(TransferMode.READ, a, b, Runs.of([0], [0], [1])))
    large = busy.start(TransferMode.READ, a, b, Runs.of([0], [0], [nbytes]))
    small = 0
    while not large.over():
        source, target = ((a, b), (b, a))[small % 2]
        world.succeed(other.start(TransferMode.READ, source, target, Runs.of([0], [5], [64_000]), 1, 1))
        small += 1
    world.succeed(large)
    assert small > 20, f"{small} small batches came through beside a large one"


@pytest.mark.parametrize("connections", [1, 3])
def test_what_the_kernel_is_told_of_a_connection(connections: int) -> None:
    """Both ends send at once and ask whether the other's host is there; of several that share a batch none hoards bytes."""
    world = world_of("tcp", connections=connections)
    a, b, link = world.pair()
    for source, target in ((a, b), (b, a)):
        world.move(link, TransferMode.READ, source, target, Runs.of([0], [9], [3_000_000]))
    doors, ends = {address(participant.endpoint()) for participant in (a, b)}, []
    for found in sockets():
        with suppress(OSError):  # it is no connection
            if doors & {found.getsockname(), found.getpeername()}:
                ends.append([found.getsockopt(*option) for option in (NODELAY, KEEPALIVE, UNSENT)])
    world.close()
    assert len(ends) == 4 * connections, "two ends of each by which either side reads"
    assert all(nodelay and keepalive for nodelay, keepalive, _ in ends)
    assert [unsent for *_, unsent in ends].count(SHARED_UNSENT) == (2 * connections if connections > 1 else 0)


class Impostor:
    """Speaks plain TCP to a transport, as a peer that holds a valid endpoint: everything else is up to the test.

    It asks on ``out``, as a reader would, and answers on ``came``, where the victim asks it.
    """

    def __init__(self, world: World, victim: LocalParticipant, lent: list[int] | None = None) -> None:
        self.world, self.victim = world, victim
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = victim.endpoint() if lent is None else victim.endpoint_lending(lent, False)
        theirs = Endpoint.decode(self.endpoint)
        self.mine = Endpoint("impostor", "127.0.0.1", self.listener.getsockname()[1], new_token(), 1, (0,))
        self.peer = victim.connect(self.endpoint, self.mine.encode())
        self.came = self.listener.accept()[0]
        self.out = socket.create_connection((theirs.host, theirs.port))
        self.out.sendall(greeting(theirs.token) + Header(Kind.HELLO).encode())
        first = greeting(self.mine.token) + Header(Kind.HELLO).encode()
        assert self.hear(self.came, len(first)) == first
        assert self.hear(self.out, GREETING_BYTES) == greeting(self.mine.token)

    def hear(self, connection: socket.socket, size: int) -> bytes:
        """Let the world go on until so many bytes have come."""
        heard = b""
        connection.setblocking(False)
        for _ in range(20_000):
            self.world.turn(0.001)
            with suppress(BlockingIOError):
                heard += connection.recv(size - len(heard))
            if len(heard) == size:
                break
        connection.setblocking(True)
        return heard

    def greet(self) -> None:
        """Show the victim that we are who it dialled."""
        self.came.sendall(greeting(Endpoint.decode(self.endpoint).token))

    def asked(self) -> Started:
        """Have the victim ask for ``N`` bytes, and take its request."""
        batch = Batch(Verb.READ, self.peer, 0, np.array([N]), np.array([500]), 0, np.array([0]))
        started = Started([(self.victim, self.victim.submit(batch))])
        assert len(self.hear(self.came, FRAME_BYTES + 16)) == FRAME_BYTES + 16
        return started

    def close(self) -> None:
        for each in (self.out, self.came, self.listener):
            each.close()


@pytest.fixture
def impostor(world: World) -> Iterator[Impostor]:
    victim = world.local()
    victim.allocate([1 << 20], 1)
    impostor = Impostor(world, victim)
    yield impostor
    impostor.close()


N = 100_000
DATA = Header(Kind.DATA, N)

ANSWERS: dict[str, bytes] = {
    "an unknown kind": b"\xff" * FRAME_BYTES,
    "a question": Header(Kind.ASK, 1).encode(),
    "another size": DATA._replace(size=N - 1).encode() + b"x" * N,
    "more than was asked for": DATA._replace(size=N + 1).encode() + b"x" * (N + 1),
    "a chunk that is none": DATA._replace(chunk=1).encode() + b"x" * N,
    "a request to come": DATA._replace(request=7).encode() + b"x" * N,
    "a refusal of a request to come": Header(Kind.REFUSED, 1, request=7).encode() + b"x",
    "a refusal without end": Header(Kind.REFUSED, 1 << 30).encode(),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_a_source_that_breaks_the_protocol_costs_its_link_only(world: World, impostor: Impostor, what: str) -> None:
    victim, other = impostor.victim, world.local()
    other.allocate([1 << 20], 2)
    good = world.link(victim, other)
    before = victim.content(0)
    impostor.greet()
    started = impostor.asked()
    with suppress(OSError):
        impostor.came.sendall(ANSWERS[what])
    [result] = world.finish(started)
    assert result.error is not None and "impostor" in result.error and "protocol" in result.error
    assert_equal(victim.content(0), before, "the victim's memory")
    assert victim.transport.lost(impostor.peer)
    world.move(good, TransferMode.READ, other, victim, Runs.of([0], [0], [1000]))


def test_a_chunk_that_comes_twice_completes_nothing(world: World, impostor: Impostor) -> None:
    impostor.greet()
    size = 20 << 20
    victim = impostor.victim
    memory = victim.transport
    batch = Batch(Verb.READ, impostor.peer, 0, np.full(20, 1 << 20), np.zeros(20, np.int64), 0, np.zeros(20, np.int64))
    started = Started([(victim, victim.submit(batch))])
    head = Header.decode(impostor.hear(impostor.came, FRAME_BYTES + 320)[:FRAME_BYTES])
    frame = Header(Kind.DATA, head.chunk).encode() + b"x" * head.chunk
    assert size > 2 * head.chunk and memory is victim.transport
    impostor.came.setblocking(False)
    rest = memoryview(frame + frame)
    while rest and not started.over():
        with suppress(BlockingIOError, ConnectionError):
            rest = rest[impostor.came.send(rest) :]
        world.turn(0.001)
    [result] = world.finish(started)
    assert result.error is not None and "unexpected chunk" in result.error


def test_bytes_in_good_order_arrive(world: World, impostor: Impostor) -> None:
    """What the other tests break: so that they fail for the reason they name."""
    impostor.greet()
    started = impostor.asked()
    for part in (DATA.encode()[:5], DATA.encode()[5:] + b"x" * (N - 1), b"y"):
        impostor.came.sendall(part)
        world.run(0.02)
    world.succeed(started)
    assert impostor.victim.content(0)[500 : 500 + N].tobytes() == b"x" * (N - 1) + b"y"


def test_what_comes_of_a_read_that_was_given_up_is_dropped(world: World, impostor: Impostor) -> None:
    """Its source had sent it before it heard of that. The link lives on, and what was asked for next arrives."""
    impostor.greet()
    given_up = impostor.asked()
    impostor.victim.abort(given_up.halves[0][1])
    assert Header.decode(impostor.hear(impostor.came, FRAME_BYTES)) == Header(Kind.CANCEL)
    world.finish(given_up)
    next_one = impostor.asked()
    impostor.came.sendall(DATA.encode() + b"x" * N + DATA._replace(request=1).encode() + b"y" * N)
    world.succeed(next_one)
    assert impostor.victim.content(0)[500 : 500 + N].tobytes() == b"y" * N
    assert impostor.victim.transport.lost(impostor.peer) is None


def test_a_short_batch_is_copied_as_it_comes(world: World, impostor: Impostor) -> None:
    """Its reader wakes for half of what is missing, not for all of it: else most of the copying would begin when all is there."""
    impostor.greet()
    total = 900_000
    batch = Batch(Verb.READ, impostor.peer, 0, np.array([total]), np.array([0]), 0, np.array([0]))
    started = Started([(impostor.victim, impostor.victim.submit(batch))])
    impostor.came.sendall(Header(Kind.DATA, total).encode() + b"x" * 100_000)
    memory = impostor.victim.content
    for more, there in ((500_000, 100_000), (total - 600_000, 600_000)):
        world.wait_for(lambda there=there: memory(0)[:there].tobytes() == b"x" * there, "the copy of what has come")
        impostor.came.sendall(b"x" * more)
    world.succeed(started)


def question(runs: list[tuple[int, int]], memory: int = 0, chunk: int = MIN_CHUNK, request: int = 0) -> bytes:
    offsets, lengths = zip(*runs, strict=True)
    return Header(Kind.ASK, len(runs), memory, chunk, request).encode() + np.array([offsets, lengths], "<i8").tobytes()


def test_a_reader_gets_what_it_asks_for(world: World, impostor: Impostor) -> None:
    impostor.out.sendall(question([(5, 10), (100, 20)]))
    memory = impostor.victim.content(0).tobytes()
    assert Header.decode(impostor.hear(impostor.out, FRAME_BYTES)) == Header(Kind.DATA, 30)
    assert impostor.hear(impostor.out, 30) == memory[5:15] + memory[100:120]


@pytest.mark.parametrize(
    "asked",
    [
        question([(0, 10)], memory=3),
        question([((1 << 20) - 5, 10)]),
        question([(-1, 10)]),
        question([(1 << 40, 10)]),
        question([(0, 10), (10, -1)]),
    ],
)
def test_what_is_not_there_is_refused_and_costs_nothing(world: World, impostor: Impostor, asked: bytes) -> None:
    impostor.out.sendall(asked + question([(5, 10)], request=1))
    world.run(0.05)
    refused = Header.decode(impostor.hear(impostor.out, FRAME_BYTES))
    assert refused.kind is Kind.REFUSED and refused.request == 0
    assert impostor.hear(impostor.out, refused.size)
    assert Header.decode(impostor.hear(impostor.out, FRAME_BYTES)) == Header(Kind.DATA, 10, request=1)


def test_a_reader_gets_nothing_that_was_not_lent_to_it(world: World) -> None:
    """Though one of ours does not ask for it."""
    victim = world.local()
    for seed in (1, 2):
        victim.allocate([1000], seed)
    with closing(Impostor(world, victim, lent=[1])) as impostor:
        impostor.out.sendall(question([(5, 10)]) + question([(5, 10)], memory=1, request=1))
        refused = Header.decode(impostor.hear(impostor.out, FRAME_BYTES))
        assert (refused.kind, refused.request) == (Kind.REFUSED, 0)
        assert impostor.hear(impostor.out, refused.size)
        assert Header.decode(impostor.hear(impostor.out, FRAME_BYTES)) == Header(Kind.DATA, 10, request=1)


@pytest.mark.parametrize("amid", [True, False])
def test_memory_that_is_taken_back_is_sent_no_more(world: World, amid: bool) -> None:
    """Amid a frame of it that ends the link: the frame cannot be ended in a way that the reader would notice."""
    victim, size = world.local(), MAX_CHUNK
    victim.allocate([1 << 20], 1)
    victim.allocate([size], 2)
    with closing(Impostor(world, victim)) as impostor:
        impostor.out.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        impostor.out.sendall(question([(0, size)], memory=1, chunk=size) + question([(5, 10)], request=1))
        assert Header.decode(impostor.hear(impostor.out, FRAME_BYTES)) == Header(Kind.DATA, size)
        victim.deregister(int(amid))  # while the reader takes nothing
        if amid:
            lost = victim.transport.lost(impostor.peer)
            assert lost is not None and "taken back" in lost.detail
        else:
            assert len(impostor.hear(impostor.out, size)) == size
            refused = Header.decode(impostor.hear(impostor.out, FRAME_BYTES))
            assert (refused.kind, refused.request) == (Kind.REFUSED, 1)


@pytest.mark.parametrize(
    "asked",
    [
        b"\xff" * FRAME_BYTES,
        Header(Kind.DATA, 10).encode(),
        Header(Kind.ASK, 0, 0, MIN_CHUNK).encode(),
        Header(Kind.ASK, ASK_RUNS + 1, 0, MIN_CHUNK).encode(),
        question([(0, 10)], chunk=1),
        question([(0, 10)], chunk=1 << 31),
        question([(0, 0)]),
        question([(0, 1 << 20)] * 1025),
        b"".join(question([(0, 1 << 20)] * 1000, request=i) for i in range(OPEN_ASKS + 2)),
    ],
)
def test_a_reader_that_breaks_the_protocol_costs_its_link_only(world: World, impostor: Impostor, asked: bytes) -> None:
    victim, other = impostor.victim, world.local()
    other.allocate([1 << 20], 2)
    good = world.link(victim, other)
    impostor.out.sendall(asked)
    world.wait_for(lambda: victim.transport.lost(impostor.peer) is not None, "the end of the link")
    assert "protocol" in victim.transport.lost(impostor.peer).detail
    world.move(good, TransferMode.READ, victim, other, Runs.of([0], [0], [1000]))


def test_refusals_that_nobody_reads_do_not_pile_up(world: World, impostor: Impostor) -> None:
    """Who asks for what it is refused, and reads none of that, is kept waiting: each question has an answer ten times as long."""
    victim, other = impostor.victim, world.local()
    other.allocate([1 << 20], 2)
    good = world.link(victim, other)
    impostor.out.setblocking(False)
    asked, waits = memoryview(question([(0, 10)], memory=3) * 10_000), 0
    sent = 0
    while waits < 50 and sent < 32 << 20:  # until the kernel's buffers are full in both directions
        try:
            sent += impostor.out.send(asked[sent % len(asked) :])
            waits = 0
        except BlockingIOError:
            waits += 1
        world.turn(0.01)
    assert waits == 50, f"{sent} bytes of questions were taken in, and nobody reads the answers"
    world.move(good, TransferMode.READ, victim, other, Runs.of([0], [0], [1000]))
    impostor.out.settimeout(5)
    impostor.out.recv(1 << 20)  # and it goes on when they are read
    world.run(0.05)
    assert victim.transport.lost(impostor.peer) is None


def address(endpoint: bytes) -> tuple[str, int]:
    decoded = Endpoint.decode(endpoint)
    return decoded.host, decoded.port


def taken(participant: LocalParticipant) -> int:
    """How many connections it has accepted and not closed."""
    port = address(participant.endpoint())[1]
    return sum(found.family == socket.AF_INET and found.getsockname()[1] == port for found in sockets()) - 1


def test_strangers_hurt_nobody(world: World) -> None:
    """No token, no link: whatever they send, the connection is closed and nothing is said."""
    a, b, link = world.pair()
    real = Endpoint.decode(b.endpoint())
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        greeting(new_token()) + Header(Kind.HELLO).encode(),
        greeting(real.token) + Header(Kind.ASK).encode(),
        greeting(real.token) + b"\xff" * FRAME_BYTES,
    ):
        with socket.create_connection((real.host, real.port), timeout=5) as stranger:
            stranger.sendall(said)
            world.wait_for(lambda: select.select([stranger], [], [], 0)[0], "the end of the connection")  # noqa: B023
            with suppress(ConnectionError):
                assert stranger.recv(1) == b""
    for size in (1000, 2_000_000):
        world.move(link, TransferMode.READ, a, b, Runs.of([0], [0], [size]))


def test_strangers_are_bounded_in_number_and_time(world: World) -> None:
    a = LocalParticipant(TcpTransport, {"connect_timeout_s": 1.5}, "short", "cpu")
    world.adopt(a)
    b = world.local()
    world.allocate(a, b)
    link = world.link(a, b)
    world.move(link, TransferMode.READ, a, b, Runs.of([0], [0], [1000]))
    before, strangers = taken(a), []
    for _ in range(STRANGERS + 50):
        strangers.append(socket.create_connection(address(a.endpoint())))
        world.turn(0.001)
    world.run(0.05)
    assert STRANGERS // 2 < taken(a) - before <= STRANGERS
    world.move(world.link(a, b), TransferMode.READ, a, b, Runs.of([0], [0], [1000]))
    world.wait_for(lambda: taken(a) - before <= 1, "the end of all but the second link's")
    for stranger in strangers:
        stranger.close()
    world.move(link, TransferMode.READ, a, b, Runs.of([0], [0], [1000]))


def test_nobody_there_is_told_at_once(world: World) -> None:
    a = world.local()
    world.allocate(a)
    peer = a.connect(a.endpoint(), Endpoint("nobody", "127.0.0.1", NOBODY, new_token(), 1, (0,)).encode())
    batch = Batch(Verb.READ, peer, 0, np.array([N]), np.array([0]), 0, np.array([0]))
    [result] = world.finish(Started([(a, a.submit(batch))]))
    assert result.error is not None and "refused" in result.error and "nobody" in result.error


@pytest.mark.parametrize("host", ["no-such-host.invalid", "no..name", "localhost", "a" * 64])
def test_a_name_that_a_peer_tells_is_looked_up_by_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """It would be on the thread that serves all links, for as long as the peer's name servers like."""
    a = world.local()
    world.allocate(a)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it is looked up"))
    with pytest.raises(TransportError, match="where peers tell addresses"):
        a.connect(a.endpoint(), Endpoint("nobody", host, 1, new_token(), 1, (0,)).encode())
