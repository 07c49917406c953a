"""The process at the other end of a Unix socket, as the kernel names it, and not as it names itself."""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct

from kvxfer.flag import closing

__all__ = ["PeerProcess"]

_SO_PEERPIDFD = 77
_PIDFD_SEND_SIGNAL, _PIDFD_OPEN = 424, 434  # the numbers of these calls on all machines that kvxfer runs on
_CREDENTIALS = struct.Struct("3i")

_call = ctypes.CDLL(None, use_errno=True).syscall
_call.restype = ctypes.c_long


class PeerProcess:
    """Who connected a socket to this process, or who listens where this process has connected to.

    Attributes:
        pid: Its number, as this process counts; 0 if it has none here, because it runs in another pid namespace.
        held: Whether the kernel tells this process of its end. If not, its number may be another's by now.
    """

    def __init__(self, connected: socket.socket) -> None:
        """Ask the kernel.

        Raises:
            OSError: The socket is not connected, or no descriptor is left.
        """
        said = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid: int
        self.pid, *self._user = _CREDENTIALS.unpack(said)
        self._fd = _pidfd(connected, self.pid) if self.pid > 0 else -1
        self.held = self._fd >= 0
        self._close = closing(self, self._fd) if self.held else None

    def lives(self) -> bool:
        """Return whether ``pid`` is still the number of this process, and of no other. Any thread."""
        if not self.held or self._close is None:
            return False
        # Signal 0 is none: the kernel only looks. Without the right to send one, it has found the process all the same.
        return _call(_PIDFD_SEND_SIGNAL, self._fd, 0, None, 0) == 0 or ctypes.get_errno() == 1

    def equals_us(self) -> bool:
        """Return whether it may reach by itself what this process may: the same user and group, in the same pid and user namespaces.

        What it names of this host, it could then open or attach itself. Not asked: capabilities, and rules of security modules.
        """
        if self.pid <= 0 or self._user != [os.geteuid(), os.getegid()]:
            return False
        try:
            same = all(_namespace("self", kind) == _namespace(self.pid, kind) for kind in ("pid", "user"))
        except OSError:  # it has ended, or shows us nothing of itself
            return False
        return same and (not self.held or self.lives())

    def is_also(self, other: PeerProcess) -> bool:
        return self.pid == other.pid and self.held == other.held and (not self.held or self.lives())

    def close(self) -> None:
        """Let go of it; from then on it does not live as far as this object knows. Idempotent."""
        if self._close is not None:
            close, self._close = self._close, None
            close()


def _namespace(pid: int | str, kind: str) -> tuple[int, int]:
    found = os.stat(f"/proc/{pid}/ns/{kind}")
    return found.st_dev, found.st_ino


def _pidfd(connected: socket.socket, pid: int) -> int:
    """Return a descriptor of the process at the other end; -1 if it has ended, or if the kernel is older than 5.3."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:  # older than 6.5, or the process has ended
        fd = int(_call(_PIDFD_OPEN, pid, 0))
    # A process that had ended before its number was asked for has closed its end of the socket by now.
    if fd >= 0 and _hung_up(connected):
        os.close(fd)
        return -1
    return fd


def _hung_up(connected: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connected, select.POLLRDHUP)
    return bool(poll.poll(0))
