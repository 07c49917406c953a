"""Who speaks to an engine without being one: by a plain socket, or as a producer of which there is nothing but answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress

import msgspec

from kvxfer.control.sockets import ControlSockets
from kvxfer.geometry import ShardAssignment
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN
from kvxfer.testing.engine import AgentEngine, PagedMemory
from kvxfer.testing.fake import FakeTransport
from tests.control.conftest import SeededEngine


def framed(frame: bytes) -> bytes:
    """As it goes over a connection."""
    return struct.pack("<I", len(frame)) + frame


class Stranger:
    """A connection to tcp://HOST:PORT. Raises ``ConnectionError`` when the other side has hung up, ``TimeoutError`` when it
    says nothing for ``patience`` seconds. ``source`` is the address that it comes from."""

    def __init__(self, where: str, patience: float = 20.0, source: str = "") -> None:
        host, _, port = where.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host.strip("[]"), int(port)), patience, (source, 0) if source else None)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, frame: bytes) -> None:
        self.socket.sendall(framed(frame))

    def say(self, message: m.Message) -> None:
        self.send(m.encode(message))

    def recv(self) -> bytes:
        (length,) = struct.unpack("<I", self._exactly(4))
        return self._exactly(length)

    def answer(self) -> m.Message:
        return m.decode(self.recv())

    def hung_up_on(self) -> bool:
        """Whether the other side hangs up, whatever it may say before."""
        with suppress(ConnectionError):
            while True:
                try:
                    self.recv()
                except TimeoutError:
                    return False
        return True

    def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            more = self.socket.recv(n - len(data))
            if not more:
                raise ConnectionResetError("the other side has hung up")
            data += more
        return data


def hello(p: AgentEngine, **changes: object) -> m.Hello:
    """What a consumer of all heads says first to the first agent of an engine on the fake; no back end has made its endpoint."""
    rank, cache = p.agents[0].descriptor, PagedMemory().caches[0]
    values = {
        "protocol": m.PROTOCOL,
        "backend": rank.backends[0],
        "expect_epoch": rank.epoch,
        "epoch": 1,
        "engine": "stranger",
        "endpoint": b"?",
        "cache": cache,
        "assignments": (ShardAssignment(0, 0, cache.views[0].layers, 0, 4),),
        "mode": "read",
        "piece_bytes": 4096,
    }
    return m.Hello(**{**values, **changes})  # type: ignore[arg-type]


@contextmanager
def acquainted(p: AgentEngine, **changes: object) -> Iterator[Stranger]:
    """A peer whose hello, with these changes, was welcomed."""
    with (
        closing(FakeTransport("other", {"verbs": ["read"]})) as other,
        Stranger(p.agents[0].descriptor.address, 60.0) as s,
    ):
        s.say(hello(p, endpoint=other.endpoint(), **changes))
        assert isinstance(s.answer(), m.Welcome)
        yield s


@contextmanager
def served(answer: Callable[[m.Message], m.Message | None]) -> Iterator[int]:
    """Somebody who listens, and answers messages so. Yields the port."""
    sockets, over = ControlSockets(OPEN), threading.Event()
    port = sockets.listen("127.0.0.1", 0)

    def serve() -> None:
        while not over.is_set():
            sockets.poll(0.05)
            for connection in sockets.ready():
                while (frame := connection.receive()) is not None:
                    said = answer(m.decode(frame))
                    if said is not None:
                        connection.send(said)
            sockets.flush()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        over.set()
        thread.join()
        sockets.close()


@contextmanager
def impostor(d: SeededEngine, says: Mapping[type, m.Message]) -> Iterator[Source]:
    """A producer of which there is nothing but what it ``says`` to messages of each type."""
    cache = PagedMemory().caches[0]
    answers: dict[type, m.Message] = {m.Ping: m.Pong(1), **says}

    def answer(asked: m.Message) -> m.Message | None:
        said = answers.get(type(asked))
        if isinstance(asked, m.FetchRequest) and isinstance(said, m.PartReady):
            return msgspec.structs.replace(said, transfer=asked.transfer, attempt=asked.attempt)
        return said

    with served(answer) as agent, served(answer) as directory:
        rank = m.RankDescriptor(f"tcp://127.0.0.1:{agent}", 78, cache, d.agents[0].descriptor.backends)
        answers[m.Lookup] = answers.get(m.Lookup) or m.EngineDescriptor(m.PROTOCOL, "impostor", 77, (rank,))
        yield Source("127.0.0.1", directory, 77)
