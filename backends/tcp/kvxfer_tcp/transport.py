"""The transport: one listener, and a ``Link`` for each peer."""

from __future__ import annotations

import select
import socket
from collections.abc import Collection, Hashable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

from kvxfer import clock
from kvxfer.backend.base import Base
from kvxfer.backend.endpoint import check_encryption, new_token
from kvxfer.errors import TransportError
from kvxfer.transport.contract import Batch, Capabilities, Fence, Probe, Verb
from kvxfer_tcp.connection import ANY, Connection
from kvxfer_tcp.door import Door
from kvxfer_tcp.encryption import Keys
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.link import Link
from kvxfer_tcp.options import Options
from kvxfer_tcp.read import Read
from kvxfer_tcp.vectors import Pipes
from kvxfer_tcp.wire import Violation

TURN_S = 0.005
"""About how long one call of ``poll`` goes on before it returns, though more could be done."""


class TcpTransport(Base[Endpoint, Link]):
    """READ of CPU memory. Options: see ``kvxfer_tcp.options.Options``. Only the thread that made it may use it."""

    name = "tcp"
    contract = 2
    inherits = frozenset({"listen", "advertise"})
    guarded = "always"
    tells_hosts = True
    encrypted_by = "encrypt"
    costs = {"cpu": 80}
    last_resort = True
    endpoint_type = Endpoint

    def __init__(self, agent: str, options: Mapping[str, Any]) -> None:
        self._options = Options.parse(options)
        self._connections: dict[int, Connection] = {}
        self._hot: dict[Connection, None] = {}
        self._keys = Keys() if self._options.encrypt else None
        self._expected: dict[bytes, list[tuple[socket.socket, int]]] = {}
        self._by_token: dict[bytes, Link] = {}
        self._epoll = select.epoll()
        try:
            self._door = Door(self, self._options, self._admit)
        except (OSError, UnicodeError) as e:
            self._epoll.close()
            where = f"{self._options.listen} port {self._options.port}"
            raise TransportError(f"back end 'tcp' of {agent!r} cannot listen on {where}: {e}") from e
        super().__init__(agent, options)
        self.wakeup.add(self._epoll.fileno(), "connections")
        self.wakeup.add(self._door.listener.fileno(), "door")

    @classmethod
    def probe(cls) -> Probe:
        return Probe(True, "TCP works everywhere; it moves CPU memory", frozenset({"cpu"}))

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            verbs=frozenset({Verb.READ}),
            lends=True,
            memory=frozenset({"cpu"}),
            # We copy what is to be encrypted, and a page that is gone would end the process.
            elastic=self._keys is None,
            run_bytes=512,
            may_block_s=4 * TURN_S,
        )

    # What Base asks for

    def make_endpoint(self, memories: Collection[int], writable: bool) -> Endpoint:
        host = self._options.host
        lends = tuple(sorted(memories))
        key = b"" if self._keys is None else self._keys.public
        mine = Endpoint(self.agent, host, self._door.port, new_token(), self._options.connections, lends, key)
        self._expected[mine.token] = []
        return mine

    def drop_endpoint(self, mine: Endpoint) -> None:
        for opened, _ in self._expected.pop(mine.token, []):
            opened.close()

    def make_link(self, number: int, mine: Endpoint, theirs: Endpoint) -> Link:
        check_encryption(theirs, here=bool(mine.key), there=bool(theirs.key))
        pipes = Pipes() if self._keys is None else self._keys.pipes(mine, theirs)
        link = Link(self, self._options, self.memories, mine, theirs, pipes, self.complete)
        self._by_token[mine.token] = link
        for opened, number_there in self._expected.pop(mine.token):
            link.server.admit(opened, number_there)
        return link

    def drop_link(self, number: int, link: Link) -> None:
        self._by_token.pop(link.mine.token, None)
        link.lose("the link was closed here")

    def drop_memory(self, memory: int) -> None:
        for link in self.links.values():
            link.server.forget(memory)

    def start(self, number: int, link: Link, batch: Batch, after: Fence | None) -> None:
        local = self.memories.addresses(batch.local, batch.local_offsets, batch.lengths)
        remote = batch.remote_offsets
        if remote is None or remote.shape != local.shape:
            raise TransportError("a READ needs one remote offset a run")
        if batch.remote not in link.theirs.lends:
            raise TransportError(f"{link.peer} lends no memory {batch.remote}")
        link.submit(Read(number, after, local, batch.remote, remote, batch.lengths))

    def stop(self, number: int, link: Link) -> None:
        link.stop(link.flights[number])

    def batch_moved(self, number: int, link: Link) -> int:
        return link.moved(link.flights[number])

    def advance(self, readable: AbstractSet[Hashable]) -> None:
        now = clock.now()
        if "door" in readable:
            self._door.accept(self.wakeup)
        self._turns(now + TURN_S)
        self._door.expire(now)
        self.wakeup.at(self._door.due)
        if self._hot:
            self.wakeup.set()

    def shut_down(self) -> None:
        for link in self.links.values():
            link.lose("closed here")
        for parked in self._expected.values():
            for opened, _ in parked:
                opened.close()
        self._door.close()
        self._epoll.close()
        self._hot.clear()

    # What connections ask for

    def watch(self, connection: Connection) -> None:
        self._connections[connection.pipe.fd] = connection
        self._epoll.register(connection.pipe.fd, ANY)

    def heat(self, connection: Connection) -> None:
        if self._connections.get(connection.pipe.fd) is connection:
            self._hot[connection] = None

    def forget(self, connection: Connection) -> None:
        self._hot.pop(connection, None)
        if self._connections.pop(connection.pipe.fd, None) is not None:
            with suppress(OSError):
                self._epoll.unregister(connection.pipe.fd)

    def _turns(self, until: float) -> None:
        """Let connections go on, one after the other by a bounded step, until none can or the time is over."""
        hot = self._hot
        while True:
            for fd, events in self._epoll.poll(0):
                connection = self._connections.get(fd)
                if connection is not None:
                    connection.tell(events)
                    hot[connection] = None
            if not hot:
                return
            for connection in list(hot):
                if connection not in hot:
                    continue  # closed since
                del hot[connection]
                try:
                    if connection.step():
                        hot[connection] = None  # behind all others
                except (OSError, Violation) as e:
                    connection.lost(e)
                if clock.now() >= until:
                    return

    def _admit(self, token: bytes, opened: socket.socket, number: int) -> None:
        """Take a connection that has shown a token."""
        link, parked = self._by_token.get(token), self._expected.get(token)
        if link is not None and link.broken is None:
            link.server.admit(opened, number)
        elif parked is not None and len(parked) < self._options.connections:
            parked.append((opened, number))  # nothing is read from it before this side connects
        else:
            opened.close()
