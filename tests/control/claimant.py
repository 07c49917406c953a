"""The programs of `test_claims.py`: an engine that has something to hide, and one on another host that claims to be on its host.

Or one that passes on between two engines of that host what they say of themselves.

Both hold the key. The claimant's endpoint is its own, in which every name and number is what the other's hello has told of itself, and
each address that of the other's secret.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys
import threading
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from kvxfer.config import Config
from kvxfer.control.link import LinkTable
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended
from kvxfer.security import Security
from kvxfer.testing.forging import _put_together, _taken_apart
from kvxfer_cma import CmaTransport
from tests.control.node import NodeEngine, name

PATTERN = bytes(range(100, 116))
SECRET_BYTES = 8 << 20
ADDRESSES = 1 << 32


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def engine(seed: int, settings: str) -> NodeEngine:
    config = {"advertise": "auto", "transfer_timeout": 12.0, "peer_timeout": 4.0, "staging_bytes": 1 << 20}
    return NodeEngine("auto", seed=seed, **(config | json.loads(settings)))


def keeper(settings: str) -> None:
    """Tell where the secret is; fetch what the claimants offer, and tell what has come."""
    secret = np.frombuffer(bytearray(PATTERN * (SECRET_BYTES // len(PATTERN))), np.uint8)
    e = engine(0, settings)
    say(pid=os.getpid(), address=secret.ctypes.data, source=astuple(e.source))
    for number, line in enumerate(sys.stdin):
        transfer = name("x")
        e.fetch(transfer, Source(*json.loads(line)), [5], 4)
        ended = [event.outcome for event in e.wait(Ended, count=number + 1, timeout=30.0)[number:]]
        found = e.memory.read().tobytes()
        say(
            number=number,
            delivered=[outcome.delivered for outcome in ended],
            secret=PATTERN[:8] in found,
            whole=bool((secret.reshape(-1, len(PATTERN)) == np.frombuffer(PATTERN, np.uint8)).all()),
            by=[status.backend for status in e.agents[0].links()],
        )
    e.close()


def claimant(settings: str, pid: str, address: str, theirs: str) -> None:
    """Offer something, and tell what was heard of who asks for it. ``pid``: the process to be taken for, which ``theirs`` may be."""
    told: list[bytes] = []
    sent, linked, dropped = LinkTable.send, CmaTransport.make_link, CmaTransport.drop_link

    def send(table: Any, link: Any, msg: Any) -> None:
        if isinstance(msg, m.Welcome) and table._links[link].backend == "cma":
            hello = table._links[link].hello
            told.append(m.encode(hello))
            msg = msgspec.structs.replace(
                msg, endpoint=forged(msg.endpoint, hello.endpoint, int(pid), int(address), int(theirs))
            )
        sent(table, link, msg)

    def make_link(transport: Any, number: int, mine: Any, other: Any) -> Any:
        told.append(other.encode())
        return Anything()

    def drop_link(transport: Any, number: int, link: Any) -> None:
        if not isinstance(link, Anything):
            dropped(transport, number, link)

    LinkTable.send, CmaTransport.make_link, CmaTransport.drop_link = send, make_link, drop_link  # type: ignore[method-assign]
    assert linked is not make_link
    e = engine(1, settings)
    e.offer(name("x"), [3], 4, 1, True)
    say(source=astuple(e.source))
    sys.stdin.readline()
    say(told=[one.hex() for one in told])
    e.close()


def offerer(settings: str) -> None:
    """Offer something to all who come by the address that is told."""
    e = engine(1, settings)
    e.offer(name("x"), [3], 4, 1, True)
    say(address=e.address())
    e.publish_at(json.loads(sys.stdin.readline())[0])
    say(source=astuple(e.source))
    sys.stdin.readline()
    e.close()


def carrier(settings: str, listen: str) -> None:
    """Be the peer of two others, each of which has its control connection here, and pass on what they say."""
    security = Security.of(Config.from_mapping(json.loads(settings)))
    door = socket.create_server((listen, 0))
    say(address=f"tcp://{listen}:{door.getsockname()[1]}")
    host, _, port = json.loads(sys.stdin.readline())[0].removeprefix("tcp://").rpartition(":")

    def passed(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        sink.close()

    while True:
        one, other = door.accept()[0], socket.create_connection((host, int(port)))
        ends = security.accepted(one), security.dialled(other)
        try:
            for end in ends:
                if isinstance(end, ssl.SSLSocket):
                    end.do_handshake()
        except OSError:  # one that has given up meanwhile dials again
            for end in ends:
                end.close()
            continue
        for ways in (ends, ends[::-1]):
            threading.Thread(target=passed, args=ways, daemon=True).start()


class Anything:
    """A link that nobody uses."""

    broken = None
    mine = b""


def forged(mine: bytes, theirs: bytes, pid: int, address: int, their_pid: int) -> bytes:
    ours, others = _taken_apart(mine), _taken_apart(theirs)
    assert ours is not None and others is not None
    head, fields = ours

    def altered(field: Any, other: Any, depth: int) -> Any:
        if isinstance(field, list):
            return [altered(x, None, depth + 1) for x in field]
        if depth and isinstance(field, bytes):
            return PATTERN[: len(field)]
        if isinstance(field, int) and field >= ADDRESSES and depth:
            return address
        if isinstance(field, int) and other == their_pid:
            return pid
        return other if isinstance(field, str | int) and type(other) is type(field) else field

    return _put_together(head, [altered(a, b, 0) for a, b in zip(fields, others[1], strict=True)])


def astuple(source: Source) -> tuple[str, int, int]:
    return source.host, source.port, source.epoch


if __name__ == "__main__":
    {"keeper": keeper, "claimant": claimant, "offerer": offerer, "carrier": carrier}[sys.argv[1]](*sys.argv[2:])
