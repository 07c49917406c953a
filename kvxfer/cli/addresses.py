"""Checks that an engine could be reached where its settings say, by serving a directory there for a moment."""

from __future__ import annotations

import socket

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.errors import ConfigError

__all__ = ["address_problems"]


def address_problems(config: Config) -> list[str]:
    """Return why an engine with these settings could not serve its directory, or why peers would not find it."""
    out = []
    try:
        Directory(config, "doctor").close()
    except ConfigError as e:
        out.append(str(e))
    except OSError as e:
        out.append(
            f"{e}; set 'listen' to an address of this host and 'port' to one that no other process uses (if the engine "
            "itself is running here, this is no problem)"
        )
    try:
        if config.advertise is not None:
            socket.getaddrinfo(config.advertise, None)
    except (OSError, UnicodeError) as e:
        out.append(
            f"'advertise' is {config.advertise!r}, which this host cannot resolve: {e}; set it to an address or a name that "
            "peers can resolve, or to 'auto'"
        )
    return out
