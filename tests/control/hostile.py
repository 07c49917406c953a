"""Peers that have the key and take what they can, by control messages alone."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable

import msgspec

from kvxfer.config import Config
from kvxfer.control.connection import ControlConnection
from kvxfer.control.lookup import look_up
from kvxfer.control.sockets import ControlSockets, address
from kvxfer.geometry import route
from kvxfer.identity import Source, TransferId
from kvxfer.protocol import messages as m
from kvxfer.security import Security
from kvxfer.transport import Transport, load
from kvxfer.values import BlockTable

PATIENCE_S = 10.0
LINGERS_S = 0.02
Answer = Callable[[ControlConnection, bytes], None]


class Hostile:
    """A hostile peer. One method begins each attack, which goes on until ``close``, beside the others."""

    def __init__(self, config: Config) -> None:
        self._config, self._security = config, Security.of(config)
        self._sockets = ControlSockets(self._security)
        self._held: list[ControlConnection] = []
        self._plain: list[socket.socket] = []
        self._transports: list[Transport] = []
        self._over = threading.Event()
        self._lock = threading.Lock()  # the sockets belong to one thread at a time
        self._each_turn: list[Callable[[], None]] = []
        self._answers: dict[ControlConnection | None, Answer] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.is_set():
            with self._lock:
                for do in self._each_turn:
                    do()
                self._sockets.flush()
                self._sockets.poll(LINGERS_S / 4)
                for connection in self._sockets.ready():
                    answer = self._answers.get(connection) or self._answers.get(None)
                    while (frame := connection.receive()) is not None:
                        if answer is not None:
                            answer(connection, frame)
            time.sleep(LINGERS_S)

    def _dial(self, where: str) -> ControlConnection:
        connection = self._sockets.dial(where, None, m.MAX_BYTES)
        self._held.append(connection)
        return connection

    def idle(self, source: Source, connections: int) -> int:
        """Hold connections to a directory over which nothing is said; return how many came about."""
        for _ in range(0, connections, 16):  # as fast as they are accepted
            with self._lock:
                made = [self._dial(address(source.host, source.port)) for _ in range(16)]
            self._until(lambda made=made: all(one.opened or one.lost for one in made))  # type: ignore[misc]
        return sum(one.opened for one in self._held)

    def reconnect(self, source: Source, connections: int, host: str) -> int:
        """Make connections to a directory from this address, close each after its handshake, and make another, without end.

        Return how many were made at first.
        """
        open_: dict[socket.socket, float] = {}
        made = [0]

        def turn() -> None:
            for sock, until in list(open_.items()):
                if self._security.keys is None or _shaken(sock) or time.monotonic() > until:
                    del open_[sock]
                    sock.close()
            while len(open_) < connections:
                sock = socket.socket()
                sock.bind((host, 0))
                try:
                    sock.connect((source.host, source.port))
                except OSError:
                    sock.close()
                    return
                sock.setblocking(False)
                open_[self._security.dialled(sock)] = time.monotonic() + 1.0
                made[0] += 1

        with self._lock:
            self._each_turn.append(turn)
        self._until(lambda: made[0] >= connections)
        return made[0]

    def stall(self, source: Source, transfer: TransferId, links: int, names: int = 1) -> int:
        """Make ``links`` links under ``names`` names, ask for a transfer over each, and take none of its pieces."""
        rank = self._rank(source)
        cache = rank.cache
        share = route([cache], [cache])[cache.rank].assignments[cache.rank]
        transport = load(self._config.backend)(f"hostile-{time.monotonic_ns()}", self._config.backend_options)
        self._transports.append(transport)
        reads = "read" in transport.capabilities.verbs
        welcomed: list[ControlConnection] = []
        want = m.FetchRequest(transfer, 1, b"d", 0, 1, BlockTable.of([[0]]), 1, 600.0)

        def answer(connection: ControlConnection, frame: bytes) -> None:
            said = m.decode(frame)
            if isinstance(said, m.Welcome):
                welcomed.append(connection)
                connection.send(want)
            elif isinstance(said, m.AttemptClosed):
                connection.send(msgspec.structs.replace(want, attempt=said.attempt + 1))

        for i in range(links):
            mine = transport.endpoint_lending(frozenset(), False)
            hello = m.Hello(
                m.PROTOCOL, self._config.backend, rank.epoch, i + 1, f"greedy {i % names}", mine, cache, share,
                "read" if reads else "sendrecv", 4 << 20, stage_below=1 << 40,
            )  # fmt: skip
            with self._lock:
                connection = self._dial(rank.address)
                self._answers[connection] = answer
                connection.send(hello)

        def ping() -> None:
            for connection in welcomed:
                connection.send(m.Ping(1))

        self._until(lambda: len(welcomed) >= links)
        with self._lock:
            self._each_turn.append(_every(0.5, ping))
        return len(welcomed)

    def _rank(self, source: Source) -> m.RankDescriptor:
        return look_up(source.host, source.port, self._security, PATIENCE_S).engine.ranks[0]

    def _until(self, true: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not true() and time.monotonic() < until:
            time.sleep(LINGERS_S)

    def close(self) -> None:
        """End all attacks."""
        self._over.set()
        self._thread.join()
        self._sockets.close()
        for sock in self._plain:
            sock.close()
        for transport in self._transports:
            transport.close()


def _shaken(sock: socket.socket) -> bool:
    """Continue a handshake; return whether it is over, one way or the other."""
    assert isinstance(sock, ssl.SSLSocket)
    try:
        sock.do_handshake()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return False
    except OSError:
        pass
    return True


def _every(seconds: float, do: Callable[[], None]) -> Callable[[], None]:
    """Return a function that does something, unless it has within the last ``seconds``."""
    last = [0.0]

    def maybe() -> None:
        if time.monotonic() - last[0] >= seconds:
            last[0] = time.monotonic()
            do()

    return maybe
