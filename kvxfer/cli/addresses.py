"""Checks that an engine could be reached where its settings say, without taking the port from an engine that runs or starts."""

from __future__ import annotations

import socket

import msgspec
import typer

from kvxfer.backend.ports import own_addresses
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.lookup import look_up
from kvxfer.errors import ConfigError, PeerError
from kvxfer.identity import Address, IdentityError, parse_address
from kvxfer.security import Security
from kvxfer.settings import everywhere

ANSWER_S = 2.0
"""Seconds in which an engine on this host answers."""


def peer_address(text: str, option: str) -> Address:
    """Return the address of an engine's directory that an option gives."""
    try:
        return parse_address(text)
    except IdentityError as e:
        raise typer.BadParameter(f"{e}; give the HOST:PORT of an engine's directory", param_hint=option) from None


def told_address(config: Config, automatic: bool) -> str:
    """Return where peers dial an engine with these settings; with the host's other addresses, if it was found ``automatic``ally."""
    told = config.advertise or config.listen
    if not automatic:
        return told
    own = own_addresses()
    how = f"{told}, which 'advertise': 'auto' has found" + (f" ({own[told]})" if told in own else "")
    others = [f"{address} ({device})" for address, device in own.items() if address != told]
    if not others:
        return how
    return f"{how}; this host also has {', '.join(others)}: set 'advertise' to one of them if peers should use it"


def address_problems(config: Config) -> list[str]:
    """Return why an engine with these settings could not serve its directory, or why peers would not find it."""
    out = []
    try:
        Directory(msgspec.structs.replace(config, port=0), "doctor").close()
        _check_port(config)
    except ConfigError as e:
        out.append(str(e))
    except OSError as e:
        out.append(f"{e}; set 'listen' to an address of this host and 'port' to one that no other process uses")
    return out


def _check_port(config: Config) -> None:
    """Raise OSError if the port cannot be had. An engine that starts meanwhile still gets it, because nothing listens here."""
    family, *_, where = socket.getaddrinfo(
        config.listen, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(where[:2])
        except OSError as e:
            raise OSError(e.errno, f"cannot listen on {config.listen} port {config.port}: {e.strerror}") from None


def directory_address(config: Config) -> Address:
    """Return where an engine with these settings is found."""
    return Address(config.advertise or ("localhost" if everywhere(config.listen) else config.listen), config.port)


def running_engine(config: Config) -> str | None:
    """Return the name of the engine that runs on this host with these settings; None if there is none."""
    if not config.port:
        return None
    at = directory_address(config)
    try:
        return look_up(at.host, at.port, Security.of(config), ANSWER_S).engine.engine
    except (PeerError, ConfigError):
        return None
