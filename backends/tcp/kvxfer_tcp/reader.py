"""The reading side of a link: it dials, asks, and puts what comes where it belongs.

Nothing lands in memory but what a batch of this side waits for: of each frame the request must be open, and the chunk one that has not
come yet. The bytes of an aborted batch are dropped in the kernel as they come.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np

from kvxfer.errors import PeerError
from kvxfer_tcp.connection import Connection, Loop, tune
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.options import Options
from kvxfer_tcp.read import MAX_CHUNK, OPEN_ASKS, Read, ReadAsk
from kvxfer_tcp.vectors import IovecBuffer, IovecTable, Pipe, Pipes
from kvxfer_tcp.wire import FRAME_BYTES, MAX_REASON, Header, Kind, Violation, greeting

WAKE_BYTES, SHARED_WAKE = 1 << 20, 256 << 10
"""The bytes of a chunk for which a reader sleeps, on the only connection or on each of several. Without that it would
wake for the first packet, and on a busy host wait for its turn on a processor each time."""
SHORT_CHUNK, MIN_WAKE = 4 << 20, 64 << 10
"""Of a chunk that is not longer it sleeps until half of what is missing has come, or this much: what is copied out only when all is there
adds to the time of a short batch, and a long one has others to copy meanwhile."""


class End(Protocol):
    """What takes a batch that has ended."""

    def __call__(self, read: Read, cause: Exception | None = None, /) -> None: ...


class Reader:
    """All that this side reads on a link. ``end`` takes a batch, and why it failed; ``lose`` ends the link for a reason."""

    def __init__(
        self,
        loop: Loop,
        options: Options,
        mine: Endpoint,
        theirs: Endpoint,
        pipes: Pipes,
        end: End,
        lose: Callable[[str], None],
    ) -> None:
        self.mine, self.lose = mine, lose
        self._loop, self._options, self._theirs, self._pipes, self._end = loop, options, theirs, pipes, end
        self._waiting: deque[Read] = deque()
        self._open: dict[int, ReadAsk] = {}
        self._asked = 0
        self.wake_bytes = WAKE_BYTES
        self._connections: list[_Incoming] = []

    def dial(self) -> None:
        """Begin to make the connections.

        Raises:
            OSError: None can be made.
        """
        theirs = self._theirs
        count = min(self._options.connections, theirs.connections)
        self.wake_bytes = WAKE_BYTES if count == 1 else SHARED_WAKE
        for number in range(count):
            hello = greeting(theirs.token) + Header(Kind.HELLO, chunk=number).encode()
            pipe = partial(self._pipes.dialled, number=number, ahead=hello)
            self._connections.append(_Incoming(self._loop, self, self._options, (theirs.host, theirs.port), pipe))

    @property
    def connected(self) -> bool:
        """Whether all connections have been made."""
        return all(c.connected for c in self._connections)

    def start(self, read: Read) -> None:
        """Ask for a batch."""
        if read.nbytes:
            self._waiting.append(read)
            self.ask()
        else:
            self._end(read)

    def forget(self, read: Read) -> None:
        """Ask for no more of a batch, and drop what still comes for it."""
        if read in self._waiting:
            self._waiting.remove(read)
        for ask in [a for a in self._open.values() if a.read is read]:
            del self._open[ask.number]
            self._connections[0].say(Header(Kind.CANCEL, request=ask.number).encode())
            for connection in self._connections:
                connection.drop(ask)
        self.ask()

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()

    def ask(self) -> None:
        """Make requests, as many as may be open."""
        made: list[tuple[int, Read, int, int, int]] = []
        while self._waiting and len(self._open) + len(made) < OPEN_ASKS:
            read = self._waiting[0]
            lo, hi = read.asks.popleft()
            if not read.asks:
                self._waiting.popleft()
            chunk = read.chunk_bytes(len(self._connections))
            number, self._asked = self._asked, self._asked + 1
            made.append((number, read, lo, hi, chunk))
            runs = np.concatenate((read.remote[lo:hi], read.lengths[lo:hi])).astype("<i8", copy=False)
            self._connections[0].say(Header(Kind.ASK, hi - lo, read.memory, chunk, number).encode() + runs.tobytes())
        if made:
            self._connections[0].send_ahead()
        for each in made:  # while the peer looks at them
            self._open[each[0]] = ReadAsk(*each)

    def chunk(self, header: Header) -> ReadAsk | None:
        """Return the request that a chunk belongs to, or ``None`` for one that has ended.

        Raises:
            Violation: The peer was not asked for it.
        """
        ask = self._open.get(header.request)
        if ask is None:
            if header.request >= self._asked:
                raise Violation(f"data of request {header.request}, which was not made")
            if not 0 < header.size <= MAX_CHUNK:
                raise Violation(f"a chunk of {header.size} bytes")
            return None
        if header.chunk >= ask.table.chunks or not ask.missing[header.chunk]:
            raise Violation(f"unexpected chunk {header.chunk} of request {header.request}")
        if header.size != ask.table.chunk_bytes(header.chunk):
            raise Violation(f"a chunk of {header.size} bytes in place of {ask.table.chunk_bytes(header.chunk)}")
        ask.missing[header.chunk] = 0
        return ask

    def came(self, ask: ReadAsk, nbytes: int) -> None:
        """Take note that a chunk is in its place."""
        ask.left -= 1
        ask.read.left -= nbytes
        if not ask.left:
            del self._open[ask.number]
            if not ask.read.left:
                self._end(ask.read)
            self.ask()

    def moved(self, read: Read) -> int:
        """Return how many bytes of a batch have come. What the kernel still has is counted for the oldest one."""
        out = read.nbytes - read.left + sum(c.part_of(read) for c in self._connections)
        oldest = next((ask.read for ask in self._open.values()), None)
        return read.tell(out + sum(c.pipe.waiting for c in self._connections) if read is oldest else out)

    def refused(self, request: int, why: str) -> None:
        """End the batch of a request that the peer does not serve.

        Raises:
            Violation: There is no such request.
        """
        ask = self._open.pop(request, None)
        if ask is not None:
            self.forget(ask.read)
            self._end(ask.read, PeerError(f"it refused: {why}"))
        elif request >= self._asked:
            raise Violation(f"request {request} was refused, which was not made")


class _Incoming(Connection):
    """A connection that this side dialled."""

    def __init__(
        self,
        loop: Loop,
        reader: Reader,
        options: Options,
        address: tuple[str, int],
        pipe: Callable[[socket.socket], Pipe],
    ) -> None:
        self._reader = reader
        self.connected = self._greeted = False
        self._head, self._text = IovecBuffer(FRAME_BYTES), IovecBuffer(MAX_REASON)
        self._ask: ReadAsk | None = None
        self._refused: tuple[int, int] | None = None
        self._skip = 0
        self._wake = 1
        self._expect_head()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        opened = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            tune(opened, options, True)
            number = opened.connect_ex(address)
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
            super().__init__(loop, pipe(opened))
        except BaseException:
            opened.close()
            raise

    def lost(self, error: Exception) -> None:
        if isinstance(error, Violation):
            self._reader.lose(f"it broke the protocol: {error}")
        elif self._greeted:
            self._reader.lose(
                f"the connection was lost, because it closed the link or its process or host is gone ({error})"
            )
        elif self.connected:
            self._reader.lose(f"it does not know this link, because it closed it or was restarted ({error})")
        else:
            self._reader.lose(f"it cannot be reached: {error}")

    def step(self) -> bool:
        if not self.connected:
            if not self.writable and not self.readable:
                return False
            number = self.pipe.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                raise OSError(number, os.strerror(number))
            self.connected = True
        if self.talks and self.writable:
            self.write()
        if self.readable:
            self._receive()
        return self.readable or (self.writable and self.talks)

    def send_ahead(self) -> None:
        """Send what is to be said now, rather than in the next turn."""
        if self.connected and self.writable:
            with suppress(OSError):  # the next turn will see it
                self.write()

    def drop(self, ask: ReadAsk) -> None:
        """Put no more bytes of this request into memory."""
        if self._ask is ask:
            self._ask = None
            if self._left > FRAME_BYTES:
                self._skip = self._left - FRAME_BYTES
                self._expect_head()

    def part_of(self, read: Read) -> int:
        """Return how many bytes have come of the chunk that it is receiving, if that belongs to this batch."""
        whose = None if self._ask is None else self._ask.read
        return self._nbytes - max(self._left - FRAME_BYTES, 0) if whose is read else 0

    def _expect_head(self) -> None:
        self._head.empty(FRAME_BYTES)
        self._expect(self._head, 1, 2, FRAME_BYTES)

    def _expect(self, table: IovecTable, lo: int, hi: int, nbytes: int) -> None:
        self._table, self._lo, self._hi, self._left = table, lo, hi, nbytes

    def _receive(self) -> None:
        if self._skip:
            count = self.pipe.discard(self._skip)
            if count < 0:
                self._sleep(self._skip)
            else:
                self._skip -= count
            return
        count = self.pipe.receive(self._table, self._lo, self._hi)
        if count < 0:
            self._sleep(self._coming())
            return
        self._left -= count
        if self._left:
            self._lo = self._table.moved(self._lo, self._hi, count)
        if self._ask is not None and self._left <= FRAME_BYTES:
            ask, self._ask = self._ask, None
            self._reader.came(ask, self._nbytes)
        if not self._left:
            if self._refused is not None:
                (request, length), self._refused = self._refused, None
                self._reader.refused(request, self._text.read(length).decode("utf-8", "replace"))
                self._expect_head()
            else:
                self._take(self._head.read(FRAME_BYTES))

    def _coming(self) -> int:
        """Return how many bytes surely come, and are worth waking for."""
        if self._ask is None:
            return 1
        missing = self._left - FRAME_BYTES
        return missing if self._nbytes > SHORT_CHUNK else max(missing // 2, min(missing, MIN_WAKE))

    def _sleep(self, coming: int) -> None:
        """Be told once there is more; ``coming``: bytes that surely come."""
        self.readable = False
        wake = max(1, min(coming - self.pipe.held, self._reader.wake_bytes))
        if wake != self._wake:
            self._wake = wake
            # If that is there by now, this tells at once.
            self.pipe.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake)

    def _take(self, raw: bytes) -> None:
        """Act on a header."""
        if not self._greeted:
            if raw != greeting(self._reader.mine.token):
                raise Violation("what listens there does not know this link")
            self._greeted = True
            self._expect_head()
            return
        header = Header.decode(raw)
        if header.kind is Kind.DATA:
            ask = self._reader.chunk(header)
            if ask is None:
                self._skip = header.size
                self._expect_head()
                return
            lo, last = ask.table.spare[header.chunk] + 1, ask.table.spare[header.chunk + 1]
            # The next header comes with the end of these bytes, in one call.
            ask.table.rows[last] = self._head.address, FRAME_BYTES
            self._ask, self._nbytes = ask, header.size
            self._expect(ask.table, lo, last + 1, header.size + FRAME_BYTES)
        elif header.kind is Kind.REFUSED and 0 < header.size <= MAX_REASON:
            self._refused = header.request, header.size
            self._text.empty(header.size)
            self._expect(self._text, 1, 2, header.size)
        else:
            raise Violation(f"a frame {header}")
