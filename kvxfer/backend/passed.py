"""More than fits a message of a socket, passed to a process of this host: in a file without a name, by its descriptor."""

from __future__ import annotations

import fcntl
import os

from kvxfer.errors import PeerError

__all__ = ["MAX_BYTES", "passed", "taken"]

MAX_BYTES = 1 << 20


def passed(said: bytes, name: str) -> int:
    """Return a descriptor of a file that holds these bytes, which the caller must close.

    Args:
        said: At most ``MAX_BYTES``.
        name: What the system shows for the file.

    Raises:
        OSError: No descriptor is left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, said, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def taken(fd: int) -> bytes:
    """Return what such a file holds.

    Raises:
        PeerError: It is no such file, or holds too much.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # only memory has seals; reading another file could block
        said = os.pread(fd, MAX_BYTES + 1, 0)
    except OSError as e:
        raise PeerError(f"it passed a file that cannot be read ({e})") from e
    if len(said) > MAX_BYTES:
        raise PeerError("its description of itself is too long")
    return said
