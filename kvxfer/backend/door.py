"""A Unix socket that peers of this host connect to; listening on TCP; and accepting where descriptors may run out.

Its name is random, and leads to it only on its own host and in its own network namespace. So a process that can connect to it is there, and
one that is not finds that out at once. A name that a peer tells is used only if it has the form of such a name.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from typing import Annotated

from msgspec import Meta

from kvxfer.backend.wakeup import Wakeup
from kvxfer.errors import TransportError
from kvxfer.logs import logger
from kvxfer.security import RateLimitedWarnings

__all__ = ["MAX_STRANGERS", "DoorName", "UnixDoor", "accept", "knock", "listen", "short_of_descriptors"]

_FORM = r"kvxfer-[a-z0-9-]{1,24}-[0-9a-f]{32}"

DoorName = Annotated[str, Meta(pattern=f"^{_FORM}$")]
"""The name of a ``UnixDoor``, in an endpoint."""

MAX_STRANGERS = 64
"""The most sockets that have not said which link they are for; for one more, the oldest is closed."""

BACKLOG = 512
"""The most connections that the kernel keeps for a listener until they are accepted."""

REST_S = 0.1
"""Seconds until the next try when the process has no descriptor left, or the system no memory."""

_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_complain = RateLimitedWarnings(logger("kvxfer.security"), every=10.0)


def short_of_descriptors(error: OSError) -> bool:
    """Log and return True if accept failed for want of descriptors or memory.

    The peers who wait cannot know: their hosts say that the connection was made.
    """
    if error.errno not in _SHORT:
        return False
    _complain(
        "cannot accept connections, and who connects gets no answer: %s; raise the limit of descriptors (ulimit -n)",
        error.strerror,
    )
    return True


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens, and does not block; 0 takes a free port. All addresses of IPv6 include those of IPv4.

    Raises:
        OSError: The address is not available.
    """
    family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    both = family == socket.AF_INET6 and where[0] == "::"
    listener = socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket, wakeup: Wakeup) -> socket.socket | None:
    """Return a new connection, not blocking; ``None`` if there is none, or no descriptor for it.

    In the latter case the listener does not wake the thread for ``REST_S``, and the peer waits.
    """
    try:
        accepted = listener.accept()[0]
    except OSError as e:  # otherwise there is none, or it has gone again
        if short_of_descriptors(e):
            wakeup.rest(listener.fileno(), REST_S)
        return None
    accepted.setblocking(False)
    return accepted


class Elsewhere(TransportError):
    """A peer's door is not on this host, or not in this network namespace."""


def knock(name: str, peer: str) -> socket.socket:
    """Return a socket that is connected to a peer's door, or is broken if that peer has ended meanwhile. Never waits.

    Raises:
        Elsewhere: There is no such door on this host and in this network namespace.
        TransportError: No door has such a name.
        OSError: No descriptor is left, or the peer does not accept.
    """
    if re.fullmatch(_FORM, name) is None:
        raise TransportError(f"{peer} sent a name that no socket of kvxfer has")
    knocking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    try:
        knocking.connect(f"\0{name}")
    except ConnectionRefusedError as e:
        knocking.close()
        raise Elsewhere(
            f"{peer} runs on another host, or in a container that shares no network namespace with this one, or has ended: "
            "its socket is not here; choose a back end that uses a network"
        ) from e
    except BaseException:
        knocking.close()
        raise
    return knocking


class UnixDoor:
    """A listening socket, and the strangers: connections over which nothing has been said yet.

    Attributes:
        name: The socket's name in the abstract namespace.
    """

    def __init__(self, backend: str, wakeup: Wakeup) -> None:
        """Start to listen; from then on ``wakeup`` wakes when ``answer`` has something to do."""
        self.name = f"kvxfer-{backend}-{os.urandom(16).hex()}"
        self._wakeup = wakeup
        self._strangers: dict[socket.socket, None] = {}  # the oldest first
        # The abstract namespace belongs to the network namespace, and leaves no file behind.
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        wakeup.add(self._listener.fileno(), self._listener)

    def answer(self, source: object) -> socket.socket | None:
        """Handle what ``wakeup`` named; return a stranger that has sent something or is gone, whose socket the caller must close."""
        if source is self._listener:
            accepted = accept(self._listener, self._wakeup)
            if accepted is not None:
                if len(self._strangers) >= MAX_STRANGERS:
                    self._let_go(next(iter(self._strangers))).close()
                self._strangers[accepted] = None
                self._wakeup.add(accepted.fileno(), accepted)
        elif isinstance(source, socket.socket) and source in self._strangers:
            return self._let_go(source)
        return None

    def close(self) -> None:
        """Stop listening, and hang up on all strangers. Call it once."""
        for stranger in list(self._strangers):
            self._let_go(stranger).close()
        self._wakeup.remove(self._listener.fileno())
        self._listener.close()

    def _let_go(self, stranger: socket.socket) -> socket.socket:
        del self._strangers[stranger]
        self._wakeup.remove(stranger.fileno())
        return stranger
