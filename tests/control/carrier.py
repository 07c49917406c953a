"""The programs of `test_carriers.py`: a producer, a consumer, and whom each of them takes for the other."""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
from contextlib import suppress
from typing import Any

from kvxfer.config import Config
from kvxfer.identity import Source
from kvxfer.protocol.values import Ended
from kvxfer.security import Security
from tests.control.node import NodeEngine, name


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def hear() -> Any:
    return json.loads(sys.stdin.readline())


def engine(seed: int, settings: str) -> NodeEngine:
    config = {"advertise": "auto", "transfer_timeout": 12.0, "peer_timeout": 4.0, "staging_bytes": 1 << 20}
    return NodeEngine("auto", seed=seed, **(config | json.loads(settings)))


def consumer(settings: str) -> None:
    """Fetch from the engine that is told, and tell which back ends have moved it."""
    e = engine(0, settings)
    e.fetch(name("x"), Source(*hear()), [5], 4)
    e.wait(Ended, timeout=30.0)
    say(by=[status.backend for status in e.agents[0].links()])
    e.close()


def producer(settings: str) -> None:
    """Offer something to all who come by the address that is told."""
    e = engine(1, settings)
    e.offer(name("x"), [3], 4, 1, True)
    say(address=e.address())
    e.publish_at(hear()[0])
    say(source=[e.source.host, e.source.port, e.source.epoch])
    sys.stdin.readline()
    e.close()


def carrier(settings: str, listen: str) -> None:
    """Be the peer of both, each of which has its control connection here, and pass on what they say."""
    security = Security.of(Config.from_mapping(json.loads(settings)))
    door = socket.create_server((listen, 0))
    say(address=f"tcp://{listen}:{door.getsockname()[1]}")
    host, _, port = hear()[0].removeprefix("tcp://").rpartition(":")

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


if __name__ == "__main__":
    {"consumer": consumer, "producer": producer, "carrier": carrier}[sys.argv[1]](*sys.argv[2:])
