"""Whether an engine would be found where its settings say, tried by serving a directory there for a moment."""

from __future__ import annotations

import socket

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.errors import ConfigError

__all__ = ["address_problems"]


def address_problems(config: Config) -> list[str]:
    """Return why an engine with these settings could not serve its directory, or would not be found there."""
    out = []
    try:
        Directory(config, "doctor").close()
    except ConfigError as e:
        out.append(str(e))
    except OSError as e:
        out.append(
            f"{e}; set 'listen' and 'port' to what this host has and no other process uses, unless that "
            "is this very engine"
        )
    try:
        if config.advertise is not None:
            socket.getaddrinfo(config.advertise, None)
    except (OSError, UnicodeError) as e:
        out.append(
            f"'advertise' is {config.advertise!r}, which has no address here: {e}; set it to what peers can resolve, or 'auto'"
        )
    return out
