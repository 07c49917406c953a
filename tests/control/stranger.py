"""Who speaks to an engine without being one: by a plain socket, or as a producer of which there is nothing but answers."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import msgspec
import numpy as np

from kvxfer.control.sockets import ControlSockets
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.security import OPEN
from tests.control.conftest import SeededEngine, make_cache


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


@contextmanager
def poured(address: str, data: bytes, greeting: m.Message | None = None, read: bool = True) -> Iterator[None]:
    """Somebody sends the same bytes as fast as can be, and reads what comes back; whoever is cut off comes back at once."""
    over = threading.Event()

    def pour() -> None:
        while not over.is_set():
            with suppress(ConnectionError, TimeoutError), Stranger(address) as s:
                if greeting is not None:
                    s.say(greeting)
                    assert isinstance(s.answer(), m.Welcome)
                _pour(s.socket, data * max(1, 65536 // len(data)), over, read)

    thread = threading.Thread(target=pour)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _pour(sock: socket.socket, data: bytes, over: threading.Event, read: bool) -> None:
    sock.setblocking(False)
    at = 0
    while not over.is_set():
        can_read, can_write, _ = select.select([sock] if read else [], [sock], [], 0.1)
        with suppress(BlockingIOError):
            if can_read and not sock.recv(65536):
                return
            if can_write:
                at = (at + sock.send(data[at:])) % len(data)


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
    cache = make_cache(np.zeros(1 << 16, np.uint8), 1, 0, 16)
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
