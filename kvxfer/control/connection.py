"""One control connection: length-prefixed messages over TCP, without blocking, and with bounded memory.

What a peer can make this side hold is bounded. A frame's length is checked before any of it
is kept. A connection is not read while a frame waits to be received, or while a peer that dialled does not read the answers.
"""

from __future__ import annotations

import errno
import hashlib
import os
import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from kvxfer import clock
from kvxfer.backend.liveness import BINDING_BYTES
from kvxfer.control.broken import AT_ONCE, GONE, HTTP, KEYLESS, alert_for, mismatch, spoken, why_broken
from kvxfer.control.frames import HEAD, FrameBuffer
from kvxfer.identity import Address, Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.values import LinkId
from kvxfer.security import plain

Destination = LinkId | Source
"""The peer that a connection was dialled to: a producer's rank, by the link to it, or a directory."""

_READ, _READS = 64 << 10, 4
"""The most bytes read at once, and the most reads in a turn."""
_UNTAKEN = 64 << 10
"""The bytes of answers that may wait for a peer that dialled. While there are more, nothing is received from it."""
_QUEUE = 64 << 20
"""The most bytes that may wait for a slow peer; beyond, it counts as lost."""
_DREGS = 1 << 20
"""The most bytes that are read and dropped after the last message to a peer; beyond, it is cut off."""

_names = count(1)
_plain = socket.socket  # whose methods pass by TLS
_Secure = Callable[[socket.socket], socket.socket]
_Proved = Callable[[ssl.SSLSocket], str]


def _hash(said: bytes) -> bytes:
    return hashlib.blake2b(said, digest_size=BINDING_BYTES).digest()


def _on_this_host(connected: socket.socket) -> bool:
    """Return whether a socket's peer has an address of this host and network namespace."""
    host, _, *rest = connected.getpeername()
    with socket.socket(connected.family, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((host, 0, *rest))
        except OSError:
            return False
    return True


class ControlConnection:
    """One control connection, made by a ``ControlSockets`` and used by its thread.

    Attributes:
        name: A name that no other connection ever has.
        host: The host of the other end, for logs.
        connected: Whether that host has taken the connection; it may be silent since.
        destination: The peer that it was dialled to; ``None`` if the peer dialled.
        limit: The most bytes of a frame that may come.
        guest: Whether the peer dialled and is not known yet.
        lost: Why it is closed; ``None`` while it lives. Frames that came before can still be received.
        refused: Whether it is lost because nobody listens there.
        denied: Whether it is lost because one side does not accept the other's key, which trying again does not change.
        key_id: The short name of the key that the peer has proved to hold; ``None`` before that, and if there are no keys.
        short: Whether it is lost because this process has too few descriptors left for it.
        heard: When something last came, by ``kvxfer.clock``.
        answered: Whether anything ever has.
        after: How much of its inbox the owner must handle before it receives.
        waits: Whether the owner does not want to receive from it now.
    """

    def __init__(
        self,
        host: str,
        destination: Destination | None,
        limit: int,
        dirty: set[ControlConnection],
        secure: _Secure,
        proved: _Proved,
        guest: bool,
        met: bool = False,
    ) -> None:
        self.name = next(_names).to_bytes(8)
        self.host, self.destination, self.limit, self.guest = host, destination, limit, guest
        self.dialled_us = guest
        self.lost: str | None = None
        self.refused = self.denied = self.short = self.answered = False
        self.key_id: str | None = None
        self.heard = clock.now()
        self.after, self.waits = 0, False
        self.watched: tuple[int, int] | None = None  # descriptor and events that ``ControlSockets`` polls it for
        self.told = False  # its owner need not hear any more that it is lost
        self._dirty, self._secure, self._proved = dirty, secure, proved
        self._socket: socket.socket | None = None
        self.connected = self._open = False
        self._met = met  # the peer has ever said something, or another port of its engine has
        self._in, self._out = FrameBuffer(), bytearray()
        self._finished, self._dregs = False, 0
        self._want = select.EPOLLIN

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    @property
    def address(self) -> str:
        """The IP address of the other end; empty while it is not connected."""
        try:
            return "" if self._socket is None else plain(self._socket.getpeername()[0])
        except OSError:
            return ""

    @property
    def binding(self) -> bytes | None:
        """What the two ends of this connection know alike; ``None`` if it comes from another host and has no key.

        With a key it is made of the handshake: a peer that has the key and stands between two others has another one with each.
        """
        try:
            if isinstance(self._socket, ssl.SSLSocket):
                return _hash(self._socket.get_channel_binding("tls-unique") or b"")
            return None if self._socket is None or not _on_this_host(self._socket) else _hash(b"no key")
        except (OSError, ValueError):  # it has just broken
            return None

    @property
    def peer(self) -> PeerIdentity:
        """The peer that it counts for, before it has said who it is."""
        return PeerIdentity(self.host, key=self.key_id or "")

    @property
    def held(self) -> int:
        """The bytes that are held for this connection."""
        return self._in.nbytes + len(self._out)

    # --- for its owner ---------------------------------------------------------------------------------------------

    def send(self, message: m.Message) -> bool:
        """Queue a message, to be sent at the end of the turn; return false if the peer is gone or has stopped reading.

        Raises:
            PeerError: The message is too large.
        """
        return self.send_frame(m.encode(message))

    def send_frame(self, frame: bytes) -> bool:
        """Queue a message that is encoded already; see ``send``."""
        if self.lost is not None or self._finished or len(self._out) + len(frame) > _QUEUE:
            return False
        self._out += HEAD.pack(len(frame))
        self._out += frame
        self._dirty.add(self)
        return True

    def receive(self) -> bytes | None:
        """Return the next frame; ``None`` if there is none now, or if the peer must read answers first."""
        if not self.ready:
            return None
        frame = self._in.frames.popleft()
        if not self._in.frames:
            self._in.split(self.limit)  # which may have grown since
        return frame

    def put_back(self, frame: bytes) -> None:
        """Return a received frame to the front, so that ``receive`` returns it again."""
        self._in.put_back(frame)

    def finish(self) -> None:
        """Send and receive nothing more; the connection is closed once what is queued has been sent."""
        self._finished = True
        self._in.clear()
        self._dirty.add(self)

    # --- for ControlSockets -----------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether a frame can be received."""
        return bool(self._in.frames) and not self.waits and not self._choked

    @property
    def opened(self) -> bool:
        """Whether it was ever established, and the peer had the key if there is one."""
        return self._open

    @property
    def authenticated(self) -> bool:
        """Whether the peer has proved that it has an accepted key; false if there are no keys."""
        return self.key_id is not None

    @property
    def unsent(self) -> bool:
        """Whether something waits for the peer to take it."""
        return self.lost is None and len(self._out) > 0

    @property
    def pending(self) -> bool:
        """Whether TLS holds data that a poll of the socket does not show."""
        return isinstance(self._socket, ssl.SSLSocket) and self._open and not self._full and self._socket.pending() > 0

    @property
    def interest(self) -> int:
        """The events to poll it for."""
        if not self.connected:
            return select.EPOLLOUT
        if not self._open:
            return self._want
        return (0 if self._full else select.EPOLLIN) | (select.EPOLLOUT if self._out else 0)

    def hold(self, sock: socket.socket) -> None:
        """Take the socket of a peer that dialled; ``accept`` begins to use it."""
        self._socket = sock

    def accept(self) -> None:
        """Begin with a peer that dialled."""
        self.connected = True
        try:
            self._greet()
        except OSError as e:  # with a key, of a peer that has gone again
            self._fail(e)

    def connect(self, target: Address) -> None:
        """Begin to connect to an IP address."""
        family = socket.AF_INET6 if ":" in target.host else socket.AF_INET
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as e:  # this host lacks its family, or no descriptor is left
            self._unreachable(e.errno or errno.EMFILE)
            return
        error = self._socket.connect_ex((target.host, target.port))
        if error not in (0, errno.EINPROGRESS):
            self._unreachable(error)

    def lack(self) -> None:
        """Close the connection, because this process has too few descriptors left for it."""
        self.short = True
        self.lose("this process has too few descriptors left to dial it; raise its limit (ulimit -n)")

    def _unreachable(self, error: int) -> None:
        if error in (errno.EMFILE, errno.ENFILE):
            self.lack()
        else:
            self.refused = error == errno.ECONNREFUSED
            self.lose(f"it cannot be reached: {os.strerror(error)}")

    def pump(self) -> bool:
        """Read and write without blocking; return whether there may be more to read than a poll shows."""
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
        """Continue connecting and the handshake; return whether both are done."""
        assert self._socket is not None
        if not self.connected:
            error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self._unreachable(error)
                return False
            self.connected = True
            self._greet()
        if isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as e:
                self._want = select.EPOLLOUT if isinstance(e, ssl.SSLWantWriteError) else select.EPOLLIN
                return False
            self.key_id = self._proved(self._socket)
        self._open = True
        return True

    def _greet(self) -> None:
        assert self._socket is not None
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = self._secure(self._socket)

    def _read(self) -> bool:
        assert self._socket is not None
        if self._full and (error := self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            raise OSError(error, os.strerror(error))  # which no read would tell, and every poll would
        for _ in range(_READS):
            if self._full:
                return False
            try:
                data = self._socket.recv(_READ)
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            if not data:
                self.lose(self._closed(GONE))
                return False
            self.heard, self.answered, self._met = clock.now(), True, True
            if self._finished:
                self._dregs += len(data)
                if self._dregs > _DREGS:
                    self.lose("it goes on sending after the last message")
                    return False
                continue
            self._in.rest += data
            too_long = self._in.split(self.limit)
            if self._in.rest and self.key_id is None and (why := spoken(self._in.rest)):
                self._deny(why, KEYLESS)
                return False
            if too_long and not self._in.frames:
                http = self._in.rest.startswith(b"HTTP/")
                self.lose(HTTP if http else f"it sent a frame of {too_long} bytes; at most {self.limit} are allowed")
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

    def _deny(self, why: str, alert: bytes = b"") -> None:
        """Close the connection because of the two sides' keys; a peer that dialled is told why, in TLS or with this alert."""
        if self.dialled_us and self._socket is not None:
            with suppress(OSError):
                if alert:
                    _plain.send(self._socket, alert)
                _plain.shutdown(self._socket, socket.SHUT_WR)
                for _ in range(_READS):  # what is unread when it is closed would make the peer lose the alert
                    if not _plain.recv(self._socket, _READ):
                        break
        self.denied = True
        self.lose(why)

    def _fail(self, e: OSError) -> None:
        why = mismatch(e, dialled=not self.dialled_us) or self._told()
        if why:
            self._deny(why, alert_for(e))
            return
        self.lose(self._closed(why_broken(e, self._open)))

    def _closed(self, why: str) -> str:
        """Return why the connection is lost, if the peer has closed or reset it."""
        return why if self.dialled_us or self._met or not self.connected else f"{AT_ONCE}: {why}"

    def _told(self) -> str:
        """Return what the peer has said about keys before the connection broke, as it does when it closes it at once."""
        if isinstance(self._socket, ssl.SSLSocket) and self._open and not self.dialled_us:
            try:
                self._socket.recv(1)
            except OSError as e:
                return mismatch(e)
        return ""

    def lose(self, why: str) -> None:
        """Close the connection for this reason, unless it is closed already."""
        if self.lost is None:
            self.lost = why
            self._in.rest = bytearray()  # the rest of this frame will not come
            self._out = bytearray()  # not cleared: an error from sending may still hold a view of it
            self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @property
    def _full(self) -> bool:
        """Whether frames must be received before more is read."""
        return not self._finished and (bool(self._in.frames) or self._choked)

    @property
    def _choked(self) -> bool:
        return self.dialled_us and len(self._out) > _UNTAKEN
