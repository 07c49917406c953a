"""The control sockets by themselves, with a key and without one."""

from __future__ import annotations

import logging
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.control import accept, sockets
from kvxfer.control.sockets import ControlConnection, ControlSockets, address
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN, RateLimitedWarnings, Security, make_key
from tests.control.stranger import framed
from tests.descriptors import no_descriptor_left


def polled(until: Callable[[], bool], *hubs: ControlSockets) -> None:
    """Poll both sides until something is so."""
    deadline = time.monotonic() + 20
    while not until():
        assert time.monotonic() < deadline, "it has not come about"
        for hub in hubs:
            hub.poll(0.01)


def reset(knocking: socket.socket) -> None:
    """Close a connection without a goodbye."""
    knocking.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    knocking.close()


def with_key(folder: Path) -> Security:
    make_key(folder / "key")
    return Security.of(Config(key_file=str(folder / "key")))


@contextmanager
def pair(security: Security) -> Iterator[tuple[ControlSockets, ControlSockets, int]]:
    """Those of two sides, and the port at which the second one's listen."""
    ours, theirs = ControlSockets(security), ControlSockets(security)
    try:
        yield ours, theirs, theirs.listen("127.0.0.1", 0)
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize("sends", [False, True], ids=["while it reads", "while it sends"])
@pytest.mark.parametrize("keyed", [False, True])
def test_a_connection_that_is_reset_is_lost_and_closed(keyed: bool, sends: bool, tmp_path: Path) -> None:
    """The error of a failed send holds on to what could not be sent, which must not keep the connection from its end.

    A process that ends with bytes unread resets its connections, so a reset is told as an end is.
    """
    with pair(with_key(tmp_path) if keyed else OPEN) as (ours, theirs, port):
        connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
        polled(lambda: connection.opened, ours, theirs)
        descriptor = connection.fileno()
        (peer,) = theirs._by_fd.values()
        assert peer._socket is not None
        reset(peer._socket)  # which our end has not looked at
        select.select([descriptor], [], [], 5.0)
        if sends:
            connection.send(m.Ping(1))
            ours.flush()
        else:
            polled(lambda: connection.lost, ours)
        assert connection.lost is not None and "process ended" in connection.lost
        assert connection.fileno() == -1 and not connection.unsent


def test_strangers_take_the_place_of_nobody_who_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "GUESTS", 4)
    with ExitStack() as stack:
        ours, theirs, port = stack.enter_context(pair(with_key(tmp_path)))
        connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
        polled(lambda: connection.opened and any(c.authenticated for c in theirs.policy.guests), ours, theirs)
        strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(8)]
        polled(lambda: sum(bool(select.select([s], [], [], 0)[0]) for s in strangers) >= 5, ours, theirs)
        assert connection.lost is None
        connection.send(m.Ping(1))
        ours.flush()
        heard: list[bytes] = []

        def hear() -> bool:
            heard.extend(frame for c in theirs.ready() if (frame := c.receive()) is not None)
            return bool(heard)

        polled(hear, ours, theirs)
        assert m.decode(heard[0]) == m.Ping(1)


def test_who_does_not_hang_up_after_the_last_message_makes_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "GUESTS", 4)
    with pair(OPEN) as (ours, theirs, port), ExitStack() as stack:
        connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
        polled(lambda: connection.opened, ours, theirs)
        ours.finish(connection)
        door = ours.listen("127.0.0.1", 0)
        for _ in range(8):
            stack.enter_context(socket.create_connection(("127.0.0.1", door)))
        polled(lambda: connection.lost, ours)
        assert connection.lost is not None and "it was silent for longest" in connection.lost


def test_who_goes_on_sending_after_the_last_message_is_cut_off() -> None:
    with ExitStack() as stack:
        hub = ControlSockets(OPEN)
        stack.callback(hub.close)
        stranger = stack.enter_context(socket.create_connection(("127.0.0.1", hub.listen("127.0.0.1", 0))))
        stranger.setblocking(False)
        polled(lambda: hub._by_fd, hub)
        (connection,) = hub._by_fd.values()
        hub.finish(connection)

        def sends() -> bool:
            with suppress(BlockingIOError):
                stranger.send(bytes(1 << 16))
            return connection.lost is not None

        polled(sends, hub)
        assert connection.lost == "it goes on sending after the last message"


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.0"])
def test_a_stranger_that_has_gone_before_it_is_looked_at_costs_nobody_a_turn(said: bytes, tmp_path: Path) -> None:
    """As a port scanner does. With a key, Python refuses to wrap its socket, which had ended the poll, and so the turn."""
    with pair(with_key(tmp_path)) as (ours, theirs, port):
        stranger = socket.create_connection(("127.0.0.1", port))
        stranger.sendall(said)
        reset(stranger)
        connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
        polled(lambda: connection.opened and any(c.authenticated for c in theirs.policy.guests), ours, theirs)
        assert len(theirs.policy.guests) == 1


def test_who_comes_when_no_descriptor_is_left_is_heard_once_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    """Though no connection ends meanwhile: what the process had opened otherwise is closed again. The log says why nobody is heard."""
    with ExitStack() as stack:
        hub = ControlSockets(OPEN)
        stack.callback(hub.close)
        port = hub.listen("127.0.0.1", 0)
        knocking = stack.enter_context(socket.socket())
        with no_descriptor_left():
            knocking.connect(("127.0.0.1", port))
            for _ in range(3):
                hub.poll(0.01)
        (said,) = [r.getMessage() for r in caplog.records if "cannot accept" in r.getMessage()]
        assert "Too many open files; raise the limit of descriptors (ulimit -n)" in said
        knocking.sendall(framed(b"hello"))
        heard: list[bytes] = []

        def hear() -> bool:
            heard.extend(frame for c in hub.ready() if (frame := c.receive()) is not None)
            return bool(heard)

        polled(hear, hub)
        assert heard == [b"hello"]


def test_a_stranger_that_breaks_off_while_its_frame_waits_is_let_go() -> None:
    """Its socket had woken the thread again and again until its turn came."""
    with ExitStack() as stack:
        hub = ControlSockets(OPEN)
        stack.callback(hub.close)
        knocking = socket.create_connection(("127.0.0.1", hub.listen("127.0.0.1", 0)))
        knocking.sendall(framed(b"hello"))
        waiting: list[sockets.ControlConnection] = []

        def wait() -> bool:
            for c in hub.ready():
                if (frame := c.receive()) is not None:
                    hub.put_back(c, frame)
                    waiting.append(c)
            return bool(waiting)

        polled(wait, hub)
        reset(knocking)
        polled(lambda: waiting[0].lost is not None, hub)
        assert not hub.policy.guests


@pytest.mark.parametrize("known", [True, False], ids=["peers", "strangers"])
def test_unfinished_messages_of_a_peer_s_many_links_take_no_more_than_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """Each may be long, as a block table is. Who holds most loses links; the others' messages come, of which each may be longer."""
    monkeypatch.setattr(accept, "PEER_BYTES" if known else "GUEST_BYTES", bound := 1 << 20)
    monkeypatch.setattr("kvxfer.security._turned_away", RateLimitedWarnings(logging.getLogger("kvxfer.security"), 0.0))
    with ExitStack() as stack:
        hub = ControlSockets(OPEN)
        stack.callback(hub.close)
        port = hub.listen("127.0.0.1", 0)
        heard: dict[ControlConnection, list[bytes]] = {}

        def hear(many: int) -> bool:
            for connection in hub.ready():
                while (frame := connection.receive()) is not None:
                    if known:
                        hub.keep(connection, 4 << 20)
                    heard.setdefault(connection, []).append(frame)
            hub.flush()
            return len(heard if known else hub.policy.guests) >= many

        def met(host: str) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 20.0, (host, 0)))
            if known:
                sock.sendall(framed(b"hello"))
            before = len(met_all)
            polled(lambda: hear(before + 1), hub)
            met_all.append([*(heard if known else hub.policy.guests)][-1])
            return sock

        met_all: list[ControlConnection] = []
        long = framed(bytes(200 << 10))
        honest, most = met("127.0.0.1"), 190 << 10
        honest.sendall(long[:most])
        polled(lambda: hear(99) or met_all[0].held >= most - 16, hub)
        greedy = [met("127.0.0.2") for _ in range(12)]
        for one in greedy:
            one.sendall(long[: 180 << 10])
        polled(lambda: hear(99) or sum(c.lost is not None for c in met_all) >= 8, hub)
        assert sum(c.held for c in met_all) <= bound
        honest.sendall(long[most:])
        polled(lambda: hear(99) or bool(heard.get(met_all[0])) and len(heard[met_all[0]][-1]) > 9, hub)
        assert heard[met_all[0]][-1] == bytes(200 << 10) and met_all[0].lost is None
        assert "127.0.0.2" in caplog.text and "127.0.0.1" not in caplog.text
