"""Where an agent's control sockets listen."""

from __future__ import annotations

import errno

from kvxfer.config import Config
from kvxfer.control.sockets import ControlSockets
from kvxfer.settings import port_range

__all__ = ["listen_within"]


def listen_within(sockets: ControlSockets, config: Config) -> int:
    """Listen on the first port that is free of those that the settings allow, and return it.

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
