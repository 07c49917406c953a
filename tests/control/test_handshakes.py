"""Peers that connect again and again: what their handshakes cost is their own host's share, over real sockets."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvxfer import clock
from kvxfer.control import accept
from kvxfer.control.sockets import ControlSockets, address
from kvxfer.protocol import messages as m
from kvxfer.protocol import shares
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.security import OPEN, RateLimitedWarnings, Security
from kvxfer.testing.clock import SetForward
from tests.control.test_sockets import pair, polled, with_key


@contextmanager
def dialled(
    security: Security, host: str, port: int, turn: ControlSockets | None = None
) -> Iterator[ssl.SSLSocket | None]:
    """A connection from an address, with its handshake done if there are ``turn``s for it; ``None`` if it was refused."""
    sock = socket.socket()
    sock.bind((host, 0))
    sock.connect(("127.0.0.1", port))
    sock.setblocking(False)
    secured = security.dialled(sock)
    assert isinstance(secured, ssl.SSLSocket)
    refused, until = False, time.monotonic() + 20
    while turn is not None:
        assert time.monotonic() < until
        turn.poll(0.001)
        try:
            secured.do_handshake()
            break
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            continue
        except OSError:
            refused = True
            break
    try:
        yield None if refused else secured
    finally:
        secured.close()


def accepts(security: Security, host: str, port: int, theirs: ControlSockets) -> bool:
    with dialled(security, host, port, theirs) as made:
        return made is not None


def test_a_host_that_connects_without_end_is_refused_by_name_and_no_other(
    clock: SetForward, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "BURST", 5)
    monkeypatch.setattr(accept, "A_SECOND", 2)
    monkeypatch.setattr("kvxfer.security._turned_away", RateLimitedWarnings(logging.getLogger("kvxfer.security"), 0.0))
    security = with_key(tmp_path)
    with pair(security) as (ours, theirs, port), caplog.at_level(logging.WARNING):
        made = next(i for i in range(60) if not accepts(security, "127.0.0.2", port, theirs))
        assert made >= 5  # and two more for each second that this has taken
        assert "127.0.0.2" in caplog.text and "too many connections" in caplog.text
        assert accepts(security, "127.0.0.3", port, theirs), "a neighbour pays for it"
        connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
        polled(lambda: connection.opened, ours, theirs)
        clock.forward(1.1)
        assert accepts(security, "127.0.0.2", port, theirs), "its share comes back"


def test_without_a_key_connecting_costs_nothing_and_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "BURST", 1)
    with pair(Security()) as (ours, theirs, port):
        for _ in range(5):
            connection = ours.dial(address("127.0.0.1", port), None, m.MAX_BYTES)
            polled(lambda one=connection: one.opened, ours, theirs)  # type: ignore[misc]


def test_whoever_has_begun_fewest_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's handshake is done before those of forty connections that were there first."""
    monkeypatch.setattr(accept, "IN_A_TURN", 1)
    security = with_key(tmp_path)
    with pair(security) as (_, theirs, port):
        crowd = [dialled(security, "127.0.0.2", port) for _ in range(40)]
        made = [one.__enter__() for one in crowd]
        try:
            for each in made:
                assert each is not None
                with pytest.raises(ssl.SSLWantReadError):
                    each.do_handshake()  # its first message is on its way
            for _ in range(5):
                theirs.poll(0.001)
            turns = 0
            with dialled(security, "127.0.0.1", port) as newcomer:
                assert newcomer is not None
                while True:
                    try:
                        newcomer.do_handshake()
                        break
                    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        theirs.poll(0.001)
                        turns += 1
                        assert turns < 20, "it waits for the whole crowd"
        finally:
            for one in crowd:
                one.__exit__(None, None, None)


def test_guests_give_way_to_newcomers_where_descriptors_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """But some: a newcomer needs one for its handshake and hello."""
    policy = accept.AcceptPolicy(OPEN)
    guests: list[Any] = [Mock(peer=PeerIdentity("10.0.0.7"), authenticated=False) for _ in range(accept.FEW_GUESTS + 1)]
    for guest in guests:
        policy.guest(guest)
    assert policy.crowded() is None
    monkeypatch.setattr(accept, "_in_use", lambda: policy.accepted + 1)
    excess = policy.crowded()
    assert excess is not None and excess[0] in guests and "few descriptors left (ulimit -n)" in excess[1]
    policy.discard(excess[0])
    assert policy.crowded() is None


def test_hosts_are_remembered_up_to_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_DEBTORS", 3)
    monkeypatch.setattr(clock, "now", lambda: 1.0)
    policy = accept.AcceptPolicy(with_key(tmp_path))
    for i in range(10):
        assert not policy.refusal(f"10.0.0.{i}")
    assert len(policy._handshakes._owed) == 3
