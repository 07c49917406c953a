"""The zmq back end keeps the contract, over TCP and over Unix sockets, and stands up to strangers and bad peers."""

import gc
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from kvxfer.backend.endpoint import new_token
from kvxfer.errors import TransportError
from kvxfer.geometry import Region, Runs
from kvxfer.testing import ConformanceSuite
from kvxfer.testing.conformance import Started, TransferMode, World
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.participant import LocalParticipant
from kvxfer.testing.usage import resident
from kvxfer.transport import Batch, Verb
from kvxfer_zmq import ZmqTransport
from kvxfer_zmq.endpoint import Endpoint
from kvxfer_zmq.wire import Header, Kind, password, routing_id
from tests.relay import Relay


class TestTcp(ConformanceSuite):
    backend = ZmqTransport
    rounds = 1000


@pytest.mark.slow
class TestIpc(ConformanceSuite):
    backend = ZmqTransport
    gigabytes = False
    options: ClassVar[dict[str, Any]] = {"protocol": "ipc"}
    rounds = 1000


@pytest.mark.slow
class TestEncrypted(ConformanceSuite):
    backend = ZmqTransport
    gigabytes = False
    options: ClassVar[dict[str, Any]] = {"encrypt": True}
    rounds = 200


BACKEND = "zmq"


def test_sizes_that_differ_fail_both_halves(world: World) -> None:
    a, b, link = world.pair()
    [(_, sent), _] = link.halves(TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))
    received = Batch(Verb.RECV, link.peers[b.name], 0, np.array([999]), np.array([0]))
    before = b.content(0)
    results = world.finish(Started([(a, a.submit(sent)), (b, b.submit(received))]))
    for result in results:
        assert result.error is not None and "1000" in result.error and "999" in result.error
    assert_equal(b.content(0), before, "the receiver's memory")
    world.move(link, TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))


def test_ends_of_connections_leave_no_objects(world: World) -> None:
    """pyzmq's decoder of events keeps one for each number that comes with them, such as a descriptor's."""
    a, b, link = world.pair()
    before = sum(type(o) is zmq.Event for o in gc.get_objects())
    with ExitStack() as taken:
        for _ in range(8):
            a.disconnect(link.peers[a.name])
            world.wait_for(lambda link=link: b.transport.lost(link.peers[b.name]) is not None, "the end of the link")
            b.disconnect(link.peers[b.name])
            peer = a.connect(a.endpoint(), stale := b.endpoint())
            b.withdraw(stale)
            world.wait_for(lambda peer=peer: a.transport.lost(peer) is not None, "the end of a link that is refused")
            a.disconnect(peer)
            for _ in range(5):
                taken.callback(os.close, os.dup(0))  # so that others have other numbers
            link = world.link(a, b)
            world.run(0.02)
    assert sum(type(o) is zmq.Event for o in gc.get_objects()) == before


@pytest.mark.parametrize("asked_for", ["before", "after"])
def test_a_skipped_stream_fails(world: World, asked_for: str) -> None:
    """The sender went on to the next stream, so the one in between never comes."""
    a, b, link = world.pair()
    _, (_, skipped) = link.halves(TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))
    started = Started([(b, b.submit(skipped))])
    if asked_for == "before":
        world.run(0.05)
    world.succeed(link.start(TransferMode.SEND, a, b, Runs.of([0], [0], [1000])))
    [result] = world.finish(started)
    assert result.error is not None and "skipped" in result.error


@pytest.mark.parametrize("first", [0, 1], ids=["SEND", "RECV"])
def test_a_half_that_comes_after_the_other_was_given_up_ends(world: World, first: int) -> None:
    a, b, link = world.pair()
    halves = link.halves(TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))
    (giver, given_up), (other, late) = halves[first], halves[1 - first]
    started = Started([(giver, giver.submit(given_up))])
    giver.abort(started.halves[0][1])
    world.finish(started)
    # Messages keep their order, so after this the other side has heard of it.
    world.move(link, TransferMode.SEND, b, a, Runs.of([0], [0], [1000]))
    [result] = world.finish(Started([(other, other.submit(late))]))
    assert result.error is not None and "the other side aborted it" in result.error
    world.move(link, TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))


class Impostor:
    """Speaks raw ZeroMQ to a transport, as a peer that holds a valid endpoint: everything else is up to the test."""

    def __init__(self, world: World, victim: LocalParticipant) -> None:
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.PLAIN_SERVER, 1)
        self.doorkeeper = ThreadAuthenticator(self.context)
        self.doorkeeper.start()
        port = self.router.bind_to_random_port("tcp://127.0.0.1")
        theirs = victim.endpoint()
        mine = Endpoint("impostor", f"tcp://127.0.0.1:{port}", new_token())
        self.doorkeeper.configure_plain("*", {"peer": password(mine.token).decode()})
        self.peer = victim.connect(theirs, mine.encode())
        self.victim, self.world, self.name = victim, world, "impostor"
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.ROUTING_ID, routing_id(Endpoint.decode(theirs).token, mine.token))
        self.dealer.setsockopt(zmq.PLAIN_USERNAME, b"peer")
        self.dealer.setsockopt(zmq.PLAIN_PASSWORD, password(Endpoint.decode(theirs).token))
        self.dealer.connect(Endpoint.decode(theirs).address)
        self.say(Header(Kind.HELLO), b"")

    def say(self, *frames: Header | bytes) -> None:
        self.dealer.send_multipart([f.encode() if isinstance(f, Header) else f for f in frames])

    def close(self) -> None:
        self.doorkeeper.stop()
        self.context.destroy(0)


@pytest.fixture
def impostor(world: World) -> Iterator[Impostor]:
    victim = world.local()
    victim.allocate([1 << 20], 1)
    impostor = Impostor(world, victim)
    yield impostor
    impostor.close()


N = 100_000

VIOLATIONS: dict[str, list[Header | bytes]] = {
    "no header": [b""],
    "a short header": [b"\x04abc", b""],
    "an unknown kind": [b"\xff" * 25, b""],
    "one frame too many": [Header(Kind.DATA, 0, 0), b"x" * 100, b"y"],
    "one frame too few": [Header(Kind.DATA, 0, 0)],
    "bytes at the wrong place": [Header(Kind.DATA, 0, 5), b"x" * 100],
    "bytes far outside": [Header(Kind.DATA, 0, 1 << 62), b"x" * 100],
    "bytes beyond the end": [Header(Kind.DATA, 0, 0), b"x" * (N + 1)],
    "bytes of a stream to come": [Header(Kind.DATA, 7, 0), b"x" * 100],
    "no bytes": [Header(Kind.DATA, 0, 0), b""],
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_peer_that_breaks_the_protocol_costs_its_link_only(world: World, impostor: Impostor, what: str) -> None:
    victim = impostor.victim
    other = world.local()
    other.allocate([1 << 20], 2)
    good = world.link(victim, other)
    before = victim.content(0)
    batch = Batch(Verb.RECV, impostor.peer, 0, np.array([N]), np.array([500]))
    started = Started([(victim, victim.submit(batch))])
    world.run(0.05)
    impostor.say(*VIOLATIONS[what])
    [result] = world.finish(started)
    assert result.error is not None and "impostor" in result.error and "protocol" in result.error
    assert_equal(victim.content(0), before, "the victim's memory")
    world.move(good, TransferMode.SEND, other, victim, Runs.of([0], [0], [1000]))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("grant", [(1 << 40, N), (N + 1, N), (5, 4)])
def test_a_grant_that_cannot_be_ends_the_batch(
    world: World, impostor: Impostor, grant: tuple[int, int], early: bool
) -> None:
    victim = impostor.victim
    batch = Batch(Verb.SEND, impostor.peer, 0, np.array([N]), np.array([500]))
    started = Started() if early else Started([(victim, victim.submit(batch))])
    impostor.say(Header(Kind.GRANT, 0, *grant), b"")
    world.run(0.05)
    started = started if started.halves else Started([(victim, victim.submit(batch))])
    [result] = world.finish(started)
    assert result.error is not None and "impostor" in result.error


def test_bytes_in_good_order_arrive(world: World, impostor: Impostor) -> None:
    """What the other tests break: so that they fail for the reason they name."""
    victim = impostor.victim
    batch = Batch(Verb.RECV, impostor.peer, 0, np.array([N]), np.array([500]))
    started = Started([(victim, victim.submit(batch))])
    world.run(0.05)
    impostor.say(Header(Kind.DATA, 0, 0), b"x" * (N - 1))
    impostor.say(Header(Kind.DATA, 0, N - 1), b"y")
    world.succeed(started)
    assert victim.content(0)[500 : 500 + N].tobytes() == b"x" * (N - 1) + b"y"


def test_a_flood_of_unknown_streams_costs_the_link(world: World, impostor: Impostor) -> None:
    victim = impostor.victim
    started = Started([(victim, victim.submit(Batch(Verb.RECV, impostor.peer, 0, np.array([N]), np.array([500]))))])
    world.run(0.05)  # it is let in
    for stream in range(10_000):
        impostor.say(Header(Kind.GRANT, stream, 1, 1), b"")
    [result] = world.finish(started)
    assert result.error is not None and "streams" in result.error


def test_questions_whose_answers_are_not_read_cost_the_link(world: World, impostor: Impostor) -> None:
    """They would wait here in any number."""
    asked = 0
    while impostor.victim.transport.lost(impostor.peer) is None and asked < 1_000_000:
        try:
            impostor.dealer.send_multipart([Header(Kind.HELLO).encode(), b""], zmq.NOBLOCK)
            asked += 1
        except zmq.Again:
            world.turn(0.0)
    lost = impostor.victim.transport.lost(impostor.peer)
    assert lost is not None and "does not read" in lost.detail


def test_what_this_side_has_to_say_itself_does_not_count_as_answers(world: World, impostor: Impostor) -> None:
    victim = impostor.victim
    world.wait_for(lambda: victim.transport._open[impostor.peer]._heard, "the impostor's HELLO")
    batch = Batch(Verb.RECV, impostor.peer, 0, np.array([8]), np.array([0]))
    victim.transport._open[impostor.peer]._control.extend([(Header(Kind.GRANT, 0, 8, 8), b"")] * 10_000)
    victim.submit(batch)
    impostor.say(Header(Kind.HELLO), b"")
    world.run(0.1)
    assert victim.transport.lost(impostor.peer) is None


def test_strangers_fill_no_memory(world: World) -> None:
    """By a message whose parts never end, in ZeroMQ's own protocol: as nobody, and with a password that is none."""
    a, b, link = world.pair()
    host, _, port = Endpoint.decode(b.endpoint()).address.removeprefix("tcp://").rpartition(":")
    ready = b"\4\x1c\5READY\x0bSocket-Type\0\0\0\6DEALER"
    shown = b"\4\x0e\5HELLO\4peer\3abc"
    part = b"\1\xff" + bytes(255)
    for mechanism, greeting in ((b"NULL", ready), (b"PLAIN", shown + ready)):
        start = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0" + mechanism.ljust(52, b"\0") + greeting
        before, until = resident(), time.monotonic() + 2.0
        poured = 0
        while time.monotonic() < until and poured < 256 << 20:
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=0.2) as raw:
                raw.sendall(start)
                while time.monotonic() < until and poured < 256 << 20:
                    raw.sendall(part * 1000)
                    poured += len(part) * 1000
                    world.run(0.0)
            world.run(0.001)
        assert resident() - before < 32 << 20, mechanism
    world.move(link, TransferMode.SEND, a, b, Runs.of([0], [0], [1000]))


def test_unix_sockets_are_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    transport = ZmqTransport("agent", {"protocol": "ipc"})
    assert list(tmp_path.iterdir())
    transport.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("encrypt", [True, False])
def test_who_listens_on_the_way_learns_nothing_from_an_encrypted_link(encrypt: bool) -> None:
    """Not the bytes, and not the tokens by which a link is known; in the clear both can be read, so the tap works."""
    a, b = (ZmqTransport(name, {"encrypt": encrypt}) for name in "ab")
    secret = np.frombuffer(b"the KV of somebody's prompt. " * 100, np.uint8).copy()
    got = np.zeros_like(secret)
    for transport, memory in ((a, secret), (b, got)):
        transport.register([Region(memory.ctypes.data, memory.nbytes)])
    mine, theirs = a.endpoint(), b.endpoint()
    told = Endpoint.decode(theirs)
    tap = Relay(told.address)
    try:
        runs = np.array([secret.nbytes]), np.array([0])
        ends = {
            a: Batch(Verb.SEND, a.connect(mine, msgspec.structs.replace(told, address=tap.address).encode()), 0, *runs),
            b: Batch(Verb.RECV, b.connect(theirs, mine), 0, *runs),
        }
        waiting = {transport: transport.submit(batch) for transport, batch in ends.items()}
        until = time.monotonic() + 20
        while waiting:
            assert time.monotonic() < until
            for transport in list(waiting):
                for done in transport.poll():
                    assert done.error is None
                    del waiting[transport]
        assert_equal(got, secret, "what has come")
        heard = bytes(tap.asked + tap.answered)
        assert len(heard) > secret.nbytes
        assert (secret.tobytes() in heard) is (told.token in heard or told.token.hex().encode() in heard) is not encrypt
    finally:
        for transport in (a, b):
            transport.close()
        tap.close()


def test_a_key_that_is_none_is_refused() -> None:
    transports = [ZmqTransport(name, {"encrypt": True}) for name in "ab"]
    try:
        ours, theirs = (transport.endpoint() for transport in transports)
        with pytest.raises(TransportError, match="'b'") as refused:
            transports[0].connect(ours, msgspec.structs.replace(Endpoint.decode(theirs), key=b"none").encode())
    finally:
        for transport in transports:
            transport.close()  # though the socket that was of no use is still known to somebody
    assert refused.tb is not None


def test_nobody_gets_in_who_does_not_know_the_key() -> None:
    """A stranger may know address and token, and speak either mechanism; it is not let past the handshake."""
    victim = ZmqTransport("victim", {"encrypt": True})
    mine = Endpoint.decode(victim.endpoint())
    context = zmq.Context()
    public, private = zmq.curve_keypair()
    try:
        for guess in (None, zmq.curve_keypair()[0]):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.ROUTING_ID, routing_id(mine.token, new_token()))
            if guess is None:
                dealer.setsockopt(zmq.PLAIN_USERNAME, b"peer")
                dealer.setsockopt(zmq.PLAIN_PASSWORD, password(mine.token))
            else:
                for option, value in (
                    (zmq.CURVE_SERVERKEY, guess),
                    (zmq.CURVE_PUBLICKEY, public),
                    (zmq.CURVE_SECRETKEY, private),
                ):
                    dealer.setsockopt(option, value)
            events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            monitor = dealer.get_monitor_socket(events | zmq.EVENT_CLOSED)
            dealer.connect(mine.address)
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                victim.poll()
                while monitor.poll(10):
                    assert recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED
            dealer.disable_monitor()
            monitor.close(0)
            dealer.close(0)
    finally:
        victim.close()
        context.term()
