"""Checks that an engine could be started and reached as its settings say, without taking the port from one that runs or starts."""

from __future__ import annotations

import socket
import ssl

import msgspec
import typer

from kvxfer.backend.ports import own_addresses
from kvxfer.cli.host import memory_bytes
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.lookup import look_up
from kvxfer.control.ports import listen_within
from kvxfer.engine.trace import check_trace
from kvxfer.errors import ConfigError, PeerError
from kvxfer.identity import Address, IdentityError, parse_address
from kvxfer.keyring import KeySet
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


def settings_problems(config: Config) -> list[str]:
    """Return why an engine with these settings could not start, or why peers would not find it or refuse it; not what back ends need."""
    out = []
    try:
        Directory(msgspec.structs.replace(config, port=0), "doctor").close()
        if (keys := Security.of(config).keys) is not None and (why := _refused(keys)):
            advice = "make a key with `kvxfer keys` that all engines accept"
            out.append(f"kvxfer setting 'key_file': key {keys.own} is refused ({why}): {advice}")
        _Bind().listen(config.listen, config.port)
        listen_within(_Bind(), config)
    except ConfigError as e:
        out.append(str(e))
    except OSError as e:
        out.append(f"{e}; set 'listen' to an address of this host and 'port' to one that no other process uses")
    if (config.staging_bytes or 0) > (has := memory_bytes()):
        out.append(
            f"kvxfer setting 'staging_bytes': each worker takes {config.staging_bytes} bytes, and this host has {has}; take less"
        )
    if config.trace is not None:
        try:
            check_trace(config.trace)
        except ConfigError as e:
            out.append(str(e))
    return out


class _Bind:
    """Stands for what listens. An engine that starts meanwhile still gets its ports, because nothing listens here."""

    def listen(self, host: str, port: int) -> int:
        """Raise OSError if the port cannot be had."""
        family, *_, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(where[:2])
            except OSError as e:
                raise OSError(e.errno, f"cannot listen on {host} port {port}: {e.strerror}") from None
        return port


def _refused(keys: KeySet) -> str:
    """Return why a peer that accepts the own key would refuse it all the same, as one that has expired; empty if none would."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = keys.client.wrap_bio(to_client, to_server)
    server = keys.server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client, server) * 2:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as e:
            return e.verify_message
    return ""


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
