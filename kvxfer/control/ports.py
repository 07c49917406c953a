"""Where control sockets listen."""

from __future__ import annotations

import errno
import socket
from typing import Protocol

from kvxfer.backend.door import listen
from kvxfer.config import Config
from kvxfer.settings import port_range


class _Listens(Protocol):
    def listen(self, host: str, port: int) -> int: ...


def listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens there without blocking; port 0 takes a free one.

    Raises:
        OSError: The address is not available.
    """
    try:
        return listen(host, port)
    except (OSError, ValueError) as e:  # as of a null character, or of a label that is too long
        number, why = (e.errno, e.strerror or e) if isinstance(e, OSError) else (errno.EINVAL, e)
        raise OSError(number, f"cannot listen on {host} port {port or 'any'}: {why}") from None


def listen_within(sockets: _Listens, config: Config) -> int:
    """Listen on the first port that is free of those that an agent's settings allow, and return it.

    Raises:
        OSError: None is, or the address is not available.
    """
    for port in port_range(config.control_ports, "control_ports"):
        try:
            return sockets.listen(config.listen, port)
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
    what = f"cannot listen on {config.listen}: no port of 'control_ports' ({config.control_ports}) is free; each worker needs one"
    raise OSError(errno.EADDRINUSE, what)
