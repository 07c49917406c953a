"""Who may talk to an engine's control sockets: one key for all engines of a deployment, and a list of addresses.

With a key, every connection is CurveZMQ: either side proves that it holds the key before a message is taken in,
messages are encrypted under keys made for the connection, and none can be replayed. The list is of those who may
connect, and of those whom a request may have us dial. Bulk bytes go over the back end's own connections, which this does
not encrypt; a peer learns where they are only over an authenticated control socket.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from kvxfer.config import Config
from kvxfer.errors import ConfigError, PeerError
from kvxfer.identity import Address, IdentityError, allowed

__all__ = ["OPEN", "Complaints", "Security", "make_key"]

log = logging.getLogger("kvxfer.security")

_MAGIC = "kvxfer-key-1"
_DOMAIN = b"kvxfer"
_LOOPBACK = ("127.0.0.0/8", "::1/128", "localhost")


class Complaints:
    """Warnings that strangers can cause: logged, but not as often as they like. Any thread."""

    def __init__(self, log: logging.Logger, every: float = 1.0) -> None:
        self._log, self._every = log, every
        self._last = -every
        self._held = 0

    def __call__(self, text: str, *args: object) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            self._held += 1
            return
        more = f" ({self._held} more were not logged)" if self._held else ""
        self._last, self._held = now, 0
        self._log.warning(text + "%s", *args, more)


_turned_away = Complaints(log)


def make_key(path: Path) -> None:
    """Write a new key to a file that does not exist yet, readable by its owner only. Raises ``ConfigError``."""
    _, secret = zmq.curve_keypair()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as e:
        raise ConfigError(f"cannot write the key {str(path)!r}: {e.strerror}") from None
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{_MAGIC} {secret.decode()}\n")


@dataclass(frozen=True)
class Security:
    """``key``: the deployment's secret key (Z85), or ``None``: no authentication. ``peers``: the allow-list (see
    ``kvxfer.identity.allowed``), or ``None``: everybody."""

    key: bytes | None = None
    peers: tuple[str, ...] | None = None

    @classmethod
    def of(cls, config: Config) -> Security:
        """As configured. Raises ``ConfigError`` when the key cannot be read or an entry of the list is none."""
        try:
            allowed(Address("127.0.0.1", 1), config.peers or ())
        except IdentityError as e:
            raise ConfigError(f"kvxfer setting 'peers': {e}") from None
        if config.key_file is None:
            if not allowed(Address(config.listen.strip("[]").lower(), 1), _LOOPBACK):
                log.warning(
                    "control sockets listen on %s without a key: whoever can reach them can read and free KV cache. "
                    "Make one with `kvxfer keys` and set 'key_file' on all engines", config.listen,
                )  # fmt: skip
            return cls(None, config.peers)
        return cls(_read_key(Path(config.key_file)), config.peers)

    def serve(self, sock: zmq.Socket[bytes]) -> None:
        """Have a listening socket ask ``admits`` about whoever connects, if there is anything to ask."""
        if self != OPEN:
            sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        if self.key is not None:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self.key)

    def dial(self, sock: zmq.Socket[bytes], target: Address) -> None:
        """Prepare a socket for this target. Raises ``PeerError`` when it must not be dialled."""
        if self.peers is not None and not allowed(target, self.peers):
            raise PeerError("it is not in the list of allowed peers; see the setting 'peers'")
        if self.key is not None:
            public = zmq.curve_public(self.key)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self.key)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
            sock.setsockopt(zmq.CURVE_SERVERKEY, public)

    def admits(self, request: list[bytes]) -> list[bytes]:
        """The answer to a ZeroMQ authentication request (RFC 27)."""
        if len(request) < 6 or request[0] != b"1.0":
            return [b"1.0", request[1] if len(request) > 1 else b"", b"500", b"not understood", b"", b""]
        version, number, _, address, _, mechanism, *credentials = request
        why = self._objection(address.decode("utf-8", "replace"), mechanism, credentials)
        if why:
            _turned_away("turned away a connection from %s: %s", address.decode("utf-8", "replace"), why)
        return [version, number, b"400" if why else b"200", why.encode(), b"", b""]

    def _objection(self, address: str, mechanism: bytes, credentials: Iterable[bytes]) -> str:
        if self.peers is not None:
            try:
                if not allowed(Address(_plain(address), 1), [_portless(entry) for entry in self.peers]):
                    return "it is not in the list of allowed peers"
            except IdentityError as e:
                return str(e)
        if self.key is not None and (
            mechanism != b"CURVE" or list(credentials) != [z85.decode(zmq.curve_public(self.key))]
        ):
            return "it does not have the key"
        return ""


OPEN = Security()
"""No key, no list: for tests, and for sockets that only this host can reach."""


def _read_key(path: Path) -> bytes:
    if not zmq.has("curve"):
        raise ConfigError("this build of ZeroMQ has no CURVE; install the pyzmq wheel, or leave 'key_file' out")
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the key {str(path)!r}: {e}") from None
    magic, _, secret = text.strip().partition(" ")
    try:
        if magic != _MAGIC:
            raise ValueError
        zmq.curve_public(secret.encode())
    except (ValueError, zmq.ZMQError):
        raise ConfigError(f"{str(path)!r} is not a key of kvxfer; make one with `kvxfer keys {path}`") from None
    if mode & 0o007:
        log.warning("the key %s can be read by every user of this host; chmod 600 it", path)
    return secret.encode()


def _plain(address: str) -> str:
    """An address as ZeroMQ reports it, without a scope, and IPv4 as such."""
    return address.partition("%")[0].removeprefix("::ffff:")


def _portless(entry: str) -> str:
    """An entry of the list without its port: those who connect come from any."""
    host, colon, port = entry.rpartition(":")
    named = colon and port.isdigit() and (host.endswith("]") or ":" not in host)
    return host if named else entry
