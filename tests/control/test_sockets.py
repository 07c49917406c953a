"""The control sockets by themselves, with a key and without one."""

from __future__ import annotations

import select
import socket
import struct
import time
from pathlib import Path

import pytest

from kvxfer.config import Config
from kvxfer.control.sockets import ControlSockets, address
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN, Security, make_key


@pytest.mark.parametrize("keyed", [False, True])
def test_a_connection_that_breaks_under_what_is_being_sent_is_lost_and_closed(keyed: bool, tmp_path: Path) -> None:
    """The error of a failed send holds on to what could not be sent, which must not keep the connection from its end."""
    security = OPEN
    if keyed:
        make_key(tmp_path / "key")
        security = Security.of(Config(key_file=str(tmp_path / "key")))
    ours, theirs = ControlSockets(security), ControlSockets(security)
    try:
        port = theirs.listen("127.0.0.1", 0, None)
        connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
        until = time.monotonic() + 10
        while not connection.opened and time.monotonic() < until:
            ours.poll(0.01)
            theirs.poll(0.01)
        assert connection.opened
        descriptor = connection.fileno()
        (peer,) = theirs._by_fd.values()
        assert peer._socket is not None
        peer._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer._socket.close()  # a reset, which our end has not looked at
        select.select([descriptor], [], [], 5.0)
        connection.send(m.Ping(1))
        ours.flush()
        assert connection.lost is not None and "the connection broke" in connection.lost
        assert connection.fileno() == -1 and not connection.unsent
    finally:
        ours.close()
        theirs.close()
