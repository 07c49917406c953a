"""The other side of a link: it serves what the peer asks for, and nothing that is not lent to that peer."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvxfer.backend.memories import Memories
from kvxfer.errors import TransportError
from kvxfer_tcp.connection import Connection, Loop
from kvxfer_tcp.read import ASK_BYTES, ASK_RUNS, MAX_CHUNK, MIN_CHUNK, OPEN_ASKS
from kvxfer_tcp.vectors import IovecBuffer, IovecTable, Pipe, Pipes
from kvxfer_tcp.wire import FRAME_BYTES, MAX_REASON, Header, Kind, Violation

READ_BYTES = 64 << 10
"""At most these bytes of requests are taken in at once."""

UNREAD_BYTES = OPEN_ASKS * (FRAME_BYTES + MAX_REASON)
"""The bytes of unread answers beyond which a peer is not listened to: that many requests it may have at once, all refused."""


@dataclass(eq=False)
class _Request:
    """What the peer has asked for, ready to be sent. ``next``: its chunk that is to follow."""

    number: int
    memory: int
    table: IovecTable
    next: int = 0


class Server:
    """All that the peer of a link reads. ``lent``: the memories that it may; ``cut`` ends the link for a reason."""

    def __init__(
        self,
        loop: Loop,
        memories: Memories,
        lent: frozenset[int],
        most: int,
        hello: bytes,
        pipes: Pipes,
        cut: Callable[[str], None],
    ) -> None:
        self.cut = cut
        self._loop, self._memories, self._lent, self._hello = loop, memories, lent, hello
        self._most, self._pipes = most, pipes
        self._queue: deque[_Request] = deque()
        self._connections: dict[int, _Outgoing] = {}

    def admit(self, opened: socket.socket, number: int) -> None:
        """Take a connection of the peer's, which has shown that it is one. Each number is taken once: keys depend on it."""
        if number >= self._most or number in self._connections:
            opened.close()
            return
        connection = _Outgoing(self._loop, self, self._pipes.accepted(opened, number), number == 0)
        connection.say(self._hello)
        self._connections[number] = connection

    def close(self) -> None:
        """Send nothing more."""
        self._queue.clear()
        for connection in self._connections.values():
            connection.close()

    def forget(self, memory: int) -> None:
        """Send nothing more of a memory."""
        if any(c.sending == memory for c in self._connections.values()):
            # Its frame cannot be ended well, nor in a way that the peer would notice.
            self.cut(f"memory {memory} was taken back while it was read")
            return
        for request in [r for r in self._queue if r.memory == memory]:
            self._queue.remove(request)
            self._refuse(request.number, f"memory {memory} was taken back")

    def next(self) -> tuple[_Request, int] | None:
        """Return the next chunk to be sent; requests take turns."""
        if not self._queue:
            return None
        request = self._queue[0]
        chunk, request.next = request.next, request.next + 1
        if request.next == request.table.chunks:
            self._queue.popleft()
        else:
            self._queue.rotate(-1)
        return request, chunk

    @property
    def busy(self) -> bool:
        """Whether chunks wait to be sent."""
        return bool(self._queue)

    def ask(self, header: Header, runs: bytes) -> None:
        """Take a request.

        Raises:
            Violation: It is none, or asks for what must not be read.
        """
        if len(self._queue) >= OPEN_ASKS:
            raise Violation(f"more than {OPEN_ASKS} requests at once")
        offsets, lengths = np.frombuffer(runs, "<i8").astype(np.int64, copy=False).reshape(2, header.size)
        if header.memory not in self._lent or header.memory not in self._memories:
            self._refuse(header.request, f"it lends no memory {header.memory}")
            return
        try:
            addresses = self._memories.addresses(header.memory, offsets, lengths)
        except TransportError as e:
            self._refuse(header.request, str(e))
            return
        if not int(lengths.min()) or int(lengths.sum()) > ASK_BYTES:  # the memory holds each, so the sum is one
            raise Violation("a request for nothing, or for more than is served at once")
        self._queue.append(_Request(header.request, header.memory, IovecTable(addresses, lengths, header.chunk)))
        for connection in self._connections.values():
            self._loop.heat(connection)

    def cancel(self, request: int) -> None:
        """Forget what is left of a request."""
        for open_ in self._queue:
            if open_.number == request:
                self._queue.remove(open_)
                return

    def _refuse(self, request: int, why: str) -> None:
        text = why.encode()[:MAX_REASON]
        self._connections[0].say(Header(Kind.REFUSED, len(text), request=request).encode() + text)


class _Outgoing(Connection):
    """A connection that the peer dialled. On the ``first`` one it asks."""

    def __init__(self, loop: Loop, server: Server, pipe: Pipe, first: bool) -> None:
        super().__init__(loop, pipe)
        self._server, self._first = server, first
        self._in, self._head = bytearray(), IovecBuffer(FRAME_BYTES)
        self._request: _Request | None = None
        self._lo = self._hi = self._left = 0
        self.readable = True  # something may have come before it was watched

    @property
    def sending(self) -> int | None:
        """The memory of which a chunk is on its way."""
        return None if self._request is None else self._request.memory

    def lost(self, error: Exception) -> None:
        if isinstance(error, Violation):
            self._server.cut(f"it broke the protocol: {error}")
        else:
            self._server.cut(f"it closed the link, or its process or host is gone ({error})")

    def step(self) -> bool:
        if self._listens:
            self._hear()
        if self.writable:
            if self._request is None and self.talks:
                self.write()
            else:
                self._send()
        waits = self._request is not None or self.talks or self._server.busy
        return self._listens or (self.writable and waits)

    @property
    def _listens(self) -> bool:
        return self.readable and len(self.out) < UNREAD_BYTES

    def _send(self) -> None:
        if self._request is None:
            following = self._server.next()
            if following is None:
                return
            self._request, chunk = following
            table = self._request.table
            nbytes = table.chunk_bytes(chunk)
            self._head.write(Header(Kind.DATA, nbytes, chunk=chunk, request=self._request.number).encode())
            self._lo, self._hi = table.spare[chunk], table.spare[chunk + 1]
            table.rows[self._lo] = self._head.address, FRAME_BYTES
            self._left = nbytes + FRAME_BYTES
        count = self.pipe.send(self._request.table, self._lo, self._hi)
        if count < 0:
            self.writable = False
            return
        self._left -= count
        if self._left:
            self._lo = self._request.table.moved(self._lo, self._hi, count)
        else:
            self._request = None

    def _hear(self) -> None:
        data = self.pipe.read(READ_BYTES)
        if data is None:
            self.readable = False
            return
        if not self._first:
            raise Violation("bytes on a connection that is not for requests")
        self._in += data
        at = 0
        while len(self._in) - at >= FRAME_BYTES:
            header = Header.decode(self._in[at : at + FRAME_BYTES])
            if header.kind is Kind.CANCEL:
                self._server.cancel(header.request)
            elif header.kind is not Kind.ASK:
                raise Violation(f"a frame {header}")
            elif not 0 < header.size <= ASK_RUNS or not MIN_CHUNK <= header.chunk <= MAX_CHUNK:
                raise Violation(f"a request for {header.size} runs in chunks of {header.chunk} bytes")
            else:
                end = at + FRAME_BYTES + 16 * header.size
                if len(self._in) < end:
                    break
                self._server.ask(header, bytes(self._in[at + FRAME_BYTES : end]))
                at = end
                continue
            at += FRAME_BYTES
        del self._in[:at]
