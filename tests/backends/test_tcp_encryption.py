"""The tcp back end with ``encrypt``: it keeps the contract, tells nothing to who listens, and believes nothing that was changed."""

import select
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from kvxfer.errors import ConfigError, TransportError
from kvxfer.geometry import Region
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Started, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.participant import LocalParticipant
from kvxfer.transport import Batch, Verb
from kvxfer_tcp import TcpTransport, encryption
from kvxfer_tcp.encryption import RECORD_BYTES, Keys
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.vectors import IovecTable
from kvxfer_tcp.wire import FRAME_BYTES, GREETING_BYTES, Header, Kind, greeting
from tests.relay import Relay

HELLO_BYTES = GREETING_BYTES + FRAME_BYTES
N = 3_000_000
"""Bytes that are read in these tests: more than fit in one record, or in two."""


@pytest.mark.slow
class TestEncrypted(ConformanceSuite):
    backend = TcpTransport
    gigabytes = False
    options: ClassVar[dict[str, Any]] = {"encrypt": True, "connections": 2}
    rounds = 200


BACKEND, OPTIONS = "tcp", {"encrypt": True}


class Tapped:
    """``b`` reads from ``a`` by way of a relay."""

    def __init__(self, world: World, options: dict[str, Any]) -> None:
        self.world = world
        self.a, self.b = (LocalParticipant(TcpTransport, options, name, "cpu") for name in "ab")
        for seed, participant in enumerate((self.a, self.b)):
            world.adopt(participant)
            participant.allocate([N], seed)
        mine, theirs = (p.transport.endpoint_lending(lends, False) for p, lends in ((self.a, [0]), (self.b, [])))
        self.told = Endpoint.decode(mine)
        self.relay = Relay(f"tcp://{self.told.host}:{self.told.port}")
        self.peer_of_a = self.a.connect(mine, theirs)
        self.peer_of_b = self.b.connect(theirs, msgspec.structs.replace(self.told, port=self.relay.port).encode())

    def read(self) -> Started:
        """Start to read everything."""
        batch = Batch(Verb.READ, self.peer_of_b, 0, np.array([N]), np.array([0]), 0, np.array([0]))
        return Started([(self.b, self.b.submit(batch))])


@pytest.fixture
def tapped(world: World) -> Iterator[Tapped]:
    tapped = Tapped(world, {"encrypt": True})
    yield tapped
    tapped.relay.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_who_listens_on_the_way_learns_nothing(world: World, encrypt: bool) -> None:
    """Neither what is read nor what was asked for. In the clear both can be found, so the relay works."""
    tapped = Tapped(world, {"encrypt": encrypt})
    secret = (b"the KV of somebody's prompt. " * (N // 29 + 1))[:N]
    tapped.a.write(0, 0, np.frombuffer(secret, np.uint8))
    try:
        world.succeed(tapped.read())
        assert tapped.b.content(0).tobytes() == secret
        asked, answered = bytes(tapped.relay.asked), bytes(tapped.relay.answered)
        assert len(answered) > N and len(asked) > HELLO_BYTES
        assert (b"somebody" in answered) is not encrypt
        assert (N.to_bytes(8, "little") in asked) is not encrypt
    finally:
        tapped.relay.close()


@pytest.mark.parametrize("at", [2, 30, N // 2, N - 5])
def test_a_bit_that_is_changed_on_its_way_fails_the_batch(world: World, tapped: Tapped, at: int) -> None:
    """In a head, in the greeting, in the midst, and in the last record: of the record that it is in nothing reaches the memory."""
    before, sent = tapped.b.content(0).copy(), tapped.a.content(0)

    def flip(data: bytes, begin: int) -> bytes:
        changed = bytearray(data)
        if begin <= at < begin + len(data):
            changed[at - begin] ^= 0x10
        return bytes(changed)

    tapped.relay.change_answered = flip
    [result] = world.finish(tapped.read())
    assert result.error is not None and "'a'" in result.error
    assert "changed on its way" in result.error or "a record of" in result.error
    assert tapped.b.transport.lost(tapped.peer_of_b)
    found = tapped.b.content(0)
    came = int(np.argmin(np.equal(found, sent))) if not np.equal(found, sent).all() else N
    assert came < N
    assert_equal(found[came + 1 :], before[came + 1 :], "the memory behind what came well")


@pytest.mark.parametrize("how", ["a record twice", "a record left out"])
def test_records_are_taken_in_their_order_only(world: World, tapped: Tapped, how: str) -> None:
    """The first record of data is as long as a record may be, and stands behind that of the greeting."""
    begin = 4 + GREETING_BYTES + 16
    end = begin + 4 + RECORD_BYTES + 16
    stream = bytearray()

    def edit(data: bytes, at: int) -> bytes:
        nonlocal stream
        stream += data
        if len(stream) < end + 1:
            return b""
        held, stream = bytes(stream), bytearray()
        tapped.relay.change_answered = lambda data, at: data
        return held[:end] + held[begin:] if how == "a record twice" else held[:begin] + held[end:]

    tapped.relay.change_answered = edit
    [result] = world.finish(tapped.read())
    assert result.error is not None and "changed on its way" in result.error


def test_a_request_that_is_changed_on_its_way_is_not_served(world: World, tapped: Tapped) -> None:
    tapped.relay.change_asked = lambda data, at: data[:-1] + bytes([data[-1] ^ 1]) if at >= HELLO_BYTES else data
    tapped.world.run(0.1)  # so that hello and request do not come together
    before = tapped.b.content(0).copy()
    [result] = world.finish(tapped.read())
    assert result.error is not None
    lost = tapped.a.transport.lost(tapped.peer_of_a)
    assert lost is not None and "changed on its way" in lost.detail
    assert_equal(tapped.b.content(0), before, "the reader's memory")


def test_another_key_opens_nothing(world: World, tapped: Tapped) -> None:
    """Who knows the tokens and has another key gets nothing, and can tell nothing."""
    mine, theirs = (p.transport.endpoint_lending(lends, False) for p, lends in ((tapped.a, [0]), (tapped.b, [])))
    wrong = msgspec.structs.replace(Endpoint.decode(mine), key=Keys().public)
    peer = tapped.a.connect(mine, theirs)
    tapped.peer_of_b = tapped.b.connect(theirs, wrong.encode())
    before = tapped.b.content(0).copy()
    [result] = world.finish(tapped.read())
    lost = tapped.a.transport.lost(peer)
    assert result.error is not None and lost is not None and "encrypted with another key" in lost.detail
    assert_equal(tapped.b.content(0), before, "the reader's memory")


def test_a_connection_that_was_recorded_is_not_taken_again(world: World, tapped: Tapped) -> None:
    """Its number was used, and with it its keys: nobody is answered under them twice."""
    world.succeed(tapped.read())
    recorded = bytes(tapped.relay.asked)
    with socket.create_connection((tapped.told.host, tapped.told.port), timeout=5) as again:
        again.sendall(recorded)
        world.wait_for(lambda: select.select([again], [], [], 0)[0], "the end of the connection")
        with suppress(ConnectionError):
            assert again.recv(1) == b""
    world.succeed(tapped.read())


def test_what_is_not_encrypted_is_not_believed(world: World, tapped: Tapped) -> None:
    """A source that speaks in the clear to who encrypts, with all that an eavesdropper knows."""
    plain = greeting(tapped.told.token) + Header(Kind.DATA, N).encode() + bytes(N)
    mine, theirs = (p.transport.endpoint_lending(lends, False) for p, lends in ((tapped.a, [0]), (tapped.b, [])))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        tapped.a.connect(mine, theirs)
        tapped.peer_of_b = tapped.b.connect(theirs, msgspec.structs.replace(Endpoint.decode(mine), port=port).encode())
        started = tapped.read()
        before = tapped.b.content(0).copy()
        came = listener.accept()[0]
        with came, suppress(OSError):
            came.settimeout(5)
            came.sendall(plain[:100_000])
            [result] = world.finish(started)
    assert result.error is not None and "protocol" in result.error
    assert_equal(tapped.b.content(0), before, "the reader's memory")


def test_a_key_is_followed_by_the_next(world: World, tapped: Tapped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "RECORDS_PER_KEY", 2)
    made: list[bytes] = []
    derive = encryption._derive

    def noted(*arguments: Any) -> bytes:
        made.append(derive(*arguments))
        return made[-1]

    monkeypatch.setattr(encryption, "_derive", noted)
    for _ in range(3):
        world.succeed(tapped.read())
    assert len(made) > 3 * N // RECORD_BYTES // 2 and len(set(made)) >= len(made) // 2
    assert_equal(tapped.b.content(0), tapped.a.content(0), "what has come")


def test_a_key_that_is_none_is_refused() -> None:
    a, b = TcpTransport("a", {"encrypt": True}), TcpTransport("b", {"encrypt": True})
    try:
        for bad in (b"\0" * 32, b"short"):
            theirs = msgspec.structs.replace(Endpoint.decode(b.endpoint()), key=bad).encode()
            with pytest.raises(TransportError, match="'b' sent no key"):
                a.connect(a.endpoint(), theirs)
    finally:
        a.close()
        b.close()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.x25519", None)
    with pytest.raises(ConfigError, match=r"'encrypt' of back end 'tcp' needs cryptography.*pip install"):
        TcpTransport("a", {"encrypt": True})


def test_copies_are_of_the_rows_and_no_byte_more() -> None:
    """In pieces of any size, out of scattered runs and back into others."""
    dice = np.random.default_rng(5)
    source, target = dice.integers(0, 256, 9000, np.uint8), np.zeros(9000, np.uint8)
    lengths = dice.integers(1, 90, 60)
    begins = np.cumsum(lengths + dice.integers(1, 9, 60)) - lengths
    out = IovecTable(source.ctypes.data + begins, lengths, 1 << 20)
    back = IovecTable(target.ctypes.data + begins, lengths, 1 << 20)
    lo, lo_back, hi, held, done = 1, 1, out.spare[1], bytearray(), 0
    while done < out.nbytes:
        if data := out.gather(lo, hi, int(dice.integers(1, 300))) if len(held) + done < out.nbytes else b"":
            held += data
            if len(held) + done < out.nbytes:
                lo = out.moved(lo, hi, len(data))
        piece = memoryview(bytes(held[: int(dice.integers(1, 300))]))
        count = back.scatter(lo_back, hi, piece)
        assert count == min(len(piece), out.nbytes - done)
        del held[:count]
        done += count
        if done < out.nbytes:
            lo_back = back.moved(lo_back, hi, count)
    wanted = np.zeros_like(target)
    for at, nbytes in zip(begins.tolist(), lengths.tolist(), strict=True):
        wanted[at : at + nbytes] = source[at : at + nbytes]
    assert_equal(target, wanted, "what was copied")


@pytest.mark.parametrize("encrypt", [True, False])
def test_elastic_memory_is_taken_only_where_the_kernel_copies(encrypt: bool) -> None:
    """A copy of ours that meets no page would end the process; a system call returns an error."""
    memory = np.zeros(4096, np.uint8)
    transport = TcpTransport("a", {"encrypt": encrypt})
    region = Region(memory.ctypes.data, memory.nbytes, elastic=True)
    try:
        with pytest.raises(TransportError, match="cannot move elastic memory directly") if encrypt else nullcontext():
            transport.register([region])
    finally:
        transport.close()
