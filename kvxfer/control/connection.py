"""One control connection: messages over TCP, each behind its length; nothing that blocks, and all of it bounded.

The frames are our own, so that what a peer can make us hold is known: a frame has a limit that is looked at before any of it is
kept, and a connection is not read while a frame waits, or while a peer that dialled us leaves our answers untaken.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import LinkId

__all__ = ["Addresses", "ControlConnection", "Destination"]

Destination = LinkId | Source
"""Whom we dial: a producer's rank, by the link to it, or a directory."""
Addresses = list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]]
"""What ``socket.getaddrinfo`` gives: each address that a name stands for."""


_HEAD = struct.Struct("<I")
_READ, _READS = 64 << 10, 4
"""Bytes that are taken in at once, and how often in a turn."""
_UNTAKEN = 64 << 10
"""A peer that has dialled us and leaves so many bytes of our answers is not heard until it has taken them."""
_QUEUE = 64 << 20
"""Bytes that may wait for a slow peer before it counts as lost."""
_DREGS = 1 << 20
"""Bytes that are thrown away of what comes after the last word to a peer, before it is cut off."""

_names = count(1)
_Secure = Callable[[socket.socket], socket.socket]


class ControlConnection:
    """One control connection, made by a ``ControlSockets`` and used by its thread.

    Attributes:
        name: Its own, and no other connection's ever.
        host: The host of the other end, for logs.
        destination: Whom we have dialled, as the owner knows it; ``None`` for a peer that has dialled us.
        limit: Bytes of the longest frame that may come.
        guest: Whether its peer has dialled us and is not known yet.
        lost: Why nothing can be said or heard any more, save frames that had come before; ``None`` while it lives.
        refused: Whether it is lost because nobody listens there, or nothing has that name.
        heard: When something came last, by ``time.monotonic``.
        after: Its owner's mark of what it does before it receives.
        waits: Whether its owner wants to hear nothing of it now.
    """

    def __init__(
        self,
        host: str,
        destination: Destination | None,
        limit: int,
        dirty: set[ControlConnection],
        secure: _Secure,
        guest: bool,
    ) -> None:
        self.name = next(_names).to_bytes(8)
        self.host, self.destination, self.limit, self.guest = host, destination, limit, guest
        self.dialled_us = guest
        self.lost: str | None = None
        self.refused = False
        self.heard = time.monotonic()
        self.after = 0
        self.waits = False
        self.watched: tuple[int, int] | None = None  # descriptor and events that ``ControlSockets`` polls it for
        self.moved = False  # has another socket since then, whose descriptor may have the same number
        self.told = False  # its owner need not hear any more that it is lost
        self.counted = 0  # of ``held``, as ``ControlSockets`` knows it
        self._dirty, self._secure = dirty, secure
        self._socket: socket.socket | None = None
        self._targets: Addresses = []  # still to be tried
        self._connected = self._open = False
        self._in = bytearray()
        self._frames: deque[bytes] = deque()  # that have come, and were at the beginning of it
        self._framed = 0  # bytes of them
        self._out = bytearray()
        self._finished, self._dregs = False, 0
        self._want = select.EPOLLIN

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def held(self) -> int:
        """How many bytes are kept for it."""
        return self._framed + len(self._in) + len(self._out)

    # --- for its owner ---------------------------------------------------------------------------------------------

    def send(self, message: m.Message) -> bool:
        """Queue a message, to leave at the end of the turn; false when the peer is gone or has stopped reading.

        Raises:
            PeerError: The message is too large.
        """
        return self.send_frame(m.encode(message))

    def send_frame(self, frame: bytes) -> bool:
        """Queue a message that is encoded already; see ``send``."""
        if self.lost is not None or self._finished or len(self._out) + len(frame) > _QUEUE:
            return False
        self._out += _HEAD.pack(len(frame))
        self._out += frame
        self._dirty.add(self)
        return True

    def receive(self) -> bytes | None:
        """Return the next frame; ``None`` when there is none now, or when the peer has to take our answers first."""
        if not self.ready:
            return None
        frame = self._frames.popleft()
        self._framed -= len(frame)
        if not self._frames:
            self._split()  # what was too long may not be any more
        return frame

    def put_back(self, frame: bytes) -> None:
        """Have the frame that was received last received again."""
        self._frames.appendleft(frame)
        self._framed += len(frame)

    def finish(self) -> None:
        """Say no more and hear no more: it is closed once the last words have left."""
        self._finished = True
        self._in.clear()
        self._frames.clear()
        self._framed = 0
        self._dirty.add(self)

    # --- for ControlSockets -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a frame can be received."""
        return bool(self._frames) and not self._choked and not self.waits

    @property
    def opened(self) -> bool:
        """Whether it has ever been there, and its peer had the key if there is one."""
        return self._open

    @property
    def authenticated(self) -> bool:
        """Whether its peer has shown that it has the key; nobody has where there is none."""
        return self._open and isinstance(self._socket, ssl.SSLSocket)

    @property
    def unsent(self) -> bool:
        """Whether something waits for the peer to take it."""
        return self.lost is None and len(self._out) > 0

    @property
    def pending(self) -> bool:
        """Whether there is something to read of which a poll does not know."""
        return isinstance(self._socket, ssl.SSLSocket) and self._open and not self._full and self._socket.pending() > 0

    @property
    def interest(self) -> int:
        """What it is to be polled for."""
        if not self._connected:
            return select.EPOLLOUT
        if not self._open:
            return self._want
        return (0 if self._full else select.EPOLLIN) | (select.EPOLLOUT if self._out else 0)

    def accepted(self, sock: socket.socket) -> None:
        self._socket, self._connected = sock, True
        self._greet()

    def connect(self, targets: Addresses) -> None:
        """Try these addresses one after the other."""
        self._targets = targets
        while self._targets:
            family, kind, protocol, _, where = self._targets.pop(0)
            try:
                self._socket = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
            except OSError as e:  # this host lacks its family, or no descriptor is left
                self._unreachable(e.errno or errno.EMFILE)
                continue
            self.moved = True
            error = self._socket.connect_ex(where)
            if error in (0, errno.EINPROGRESS):
                return
            self._unreachable(error)

    def _unreachable(self, error: int) -> None:
        if self._targets:
            self._shut()
        else:
            self.refused = error == errno.ECONNREFUSED
            self.lose(f"it cannot be reached: {os.strerror(error)}")

    def pump(self) -> bool:
        """Read and write what can be; return whether there is more to read, of which a poll may not know."""
        try:
            if self._socket is None or not (self._open or self._opened()):
                return False
            more = self._read()
            self.flush()
            return more
        except OSError as e:
            self._fail(e)
            return False

    def _opened(self) -> bool:
        """Go on with connecting and with the handshake; return whether both are done."""
        assert self._socket is not None
        if not self._connected:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._unreachable(error)
                self.connect(self._targets)
                return False
            self._connected = True
            self._greet()
        if isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
                self._want = select.EPOLLOUT if isinstance(e, ssl.SSLWantWriteError) else select.EPOLLIN
                return False
        self._open = True
        return True

    def _greet(self) -> None:
        assert self._socket is not None
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = self._secure(self._socket)

    def _read(self) -> bool:
        assert self._socket is not None
        for _ in range(_READS):
            if self._full:
                return False
            try:
                data = self._socket.recv(_READ)
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            if not data:
                self.lose("it closed the connection (its process ended, or it gave us up)")
                return False
            self.heard = time.monotonic()
            if self._finished:
                self._dregs += len(data)
                if self._dregs > _DREGS:
                    self.lose("it does not stop talking")
                    return False
                continue
            self._in += data
            too_long = self._split()
            if too_long and not self._frames:
                self.lose(f"it sent a frame of {too_long} bytes, and {self.limit} are the most")
                return False
            if len(data) < _READ and not isinstance(self._socket, ssl.SSLSocket):
                return False
        return True

    def flush(self) -> None:
        """Send what can be sent."""
        if not self._open or self._socket is None:
            return
        try:
            while self._out:
                with memoryview(self._out) as view:
                    sent = self._socket.send(view[: 1 << 18])
                del self._out[:sent]
            if self._finished:
                self._socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as e:
            self._fail(e)

    def _fail(self, e: OSError) -> None:
        why = getattr(e, "verify_message", "") or getattr(e, "reason", "") or e.strerror or str(e)
        self.lose(f"the connection broke: {why}" if self._open else f"it cannot be reached: {why}")

    def lose(self, why: str) -> None:
        """Close it, if that has not happened."""
        if self.lost is None:
            self.lost = why
            self._out = bytearray()  # not cleared: what could not be sent may be held by the error that said so
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _split(self) -> int:
        """Take the complete frames out of what has come.

        Return the length of a frame that is too long, behind which nothing is looked at; or 0.
        """
        at, end, length = 0, len(self._in), 0
        with memoryview(self._in) as view:
            while end - at >= 4:
                (length,) = _HEAD.unpack_from(view, at)
                if length > self.limit or at + 4 + length > end:
                    break
                self._frames.append(bytes(view[at + 4 : at + 4 + length]))
                self._framed += length
                at += 4 + length
        if at:
            del self._in[:at]
        return length if length > self.limit else 0

    @property
    def _full(self) -> bool:
        """Whether what has come must be taken before more may come."""
        return not self._finished and (bool(self._frames) or self._choked)

    @property
    def _choked(self) -> bool:
        return self.dialled_us and len(self._out) > _UNTAKEN
