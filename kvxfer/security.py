"""Who may talk to an engine's control sockets: the holders of some keys, and a list of addresses.

With keys, every connection is TLS 1.3. A key is a private key with its own certificate, and each side proves that
it holds one that the other accepts before any message is accepted. Messages are encrypted under keys made for the connection, and
cannot be replayed. The list says who may connect, and which addresses a request may make this engine dial. KV itself goes
over the back end's own connections, which this does not encrypt. Where these listen, and the key of a back end that
encrypts, a peer learns only over an authenticated control socket.
"""

from __future__ import annotations

import datetime
import logging
import os
import socket
import ssl
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.errors import ConfigError, PeerError
from kvxfer.failures import FailureKind
from kvxfer.identity import Address, IdentityError, allowed, canonical_host, is_ip
from kvxfer.keyfile import key_id
from kvxfer.keyring import KeyRing, KeySet, keyring
from kvxfer.logs import logger

__all__ = ["OPEN", "RateLimitedWarnings", "Security", "make_key", "plain", "portless"]

log = logger("kvxfer.security")

MAX_REPEATED = 256
"""The most complaints that are known to be equal to one before."""
_LOCAL = ("127.0.0.0/8", "::1/128")
_LOOPBACK = (*_LOCAL, "localhost")


class Repeats:
    """Decide which of many equal complaints to log: the first, then one in ``every`` seconds. Any thread may call it."""

    def __init__(self, every: float = 60.0) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._known: OrderedDict[object, tuple[float, int]] = OrderedDict()  # when last logged, and how often not since

    def logged(self, what: object) -> int | None:
        """Return how often ``what`` was left out since it was last logged, if it is to be logged now; else ``None``."""
        now = clock.now()
        with self._lock:
            last, held = self._known.pop(what, (-self._every, 0))
            if now - last < self._every:
                self._known[what] = last, held + 1
                return None
            self._known[what] = now, 0
            if len(self._known) > MAX_REPEATED:
                self._known.popitem(last=False)
            return held


class RateLimitedWarnings:
    """Log warnings that strangers can cause, at a limited rate. Any thread may call it."""

    def __init__(self, log: logging.Logger, every: float = 1.0) -> None:
        self._log, self._repeats = log, Repeats(every)

    def __call__(self, text: str, *args: object) -> None:
        held = self._repeats.logged(None)
        if held is not None:
            self._log.warning(text + "%s", *args, f" ({held} more were not logged)" if held else "")


_turned_away = RateLimitedWarnings(log)


def make_key(path: Path) -> None:
    """Write a new key to a file that does not exist yet, readable by its owner only.

    Raises:
        ConfigError: The file cannot be written, or ``cryptography`` is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as e:
        raise ConfigError(
            f"making a key needs cryptography ({e}); in a checkout: pip install '.[cli]'. Using one does not"
        ) from None
    secret = ec.generate_private_key(ec.SECP256R1())
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"kvxfer {serial:x}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(secret.public_key())
        .serial_number(serial)
        .not_valid_before(datetime.datetime(2020, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(secret, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    text = secret.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as e:
        advice = "name a file in a folder that exists and that you may write to"
        if isinstance(e, FileExistsError):
            advice = "set 'key_file' to it if it is this deployment's key, else name a file that does not exist yet"
        raise ConfigError(f"cannot write the key {str(path)!r}: {e.strerror}; {advice}") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(text + certificate.public_bytes(pem))


@dataclass(frozen=True)
class Security:
    """Who may talk to an engine.

    Attributes:
        key: The keys that this engine presents and accepts; ``None`` for no authentication.
        peers: The allow-list (see ``kvxfer.identity.allowed``); ``None`` for everybody.
    """

    key: KeyRing | None = None
    peers: tuple[str, ...] | None = None
    _repeats: Repeats = field(default_factory=Repeats, compare=False, repr=False)

    @classmethod
    def of(cls, config: Config) -> Security:
        """Return what the configuration asks for; warn if sockets are open to other hosts without a key.

        Raises:
            ConfigError: The key cannot be read, or an entry of the allow-list is invalid.
        """
        peers = config.peers
        if peers is not None:
            peers = tuple(
                one
                for entry in map(str.strip, peers)
                for one in (_LOCAL if portless(entry).lower() == "localhost" else (entry,))
            )
            try:
                allowed(Address("127.0.0.1", 1), peers)
            except IdentityError as e:
                raise ConfigError(f"kvxfer setting 'peers': {e}") from None
            for entry in peers:
                if "/" not in entry and not is_ip(portless(entry).strip("[]")):
                    raise ConfigError(f"kvxfer setting 'peers': {entry!r} is a name; list addresses and networks")
        if config.key_file is None:
            if not allowed(Address(config.listen.lower(), 1), _LOOPBACK):
                log.warning(
                    "control sockets listen on %s without a key: anybody who can reach them can read and free KV cache. "
                    "Make one with `kvxfer keys` and set 'key_file' on all engines",
                    config.listen,
                )
            return cls(None, peers)
        return cls(keyring(Path(config.key_file)), peers)

    @property
    def keys(self) -> KeySet | None:
        """The keys as they were last read."""
        return None if self.key is None else self.key.keys

    @property
    def fresh(self) -> bool:
        """Whether nothing has changed that ``refresh`` would take in. Does not block."""
        return self.key is None or self.key.fresh

    def refresh(self) -> None:
        """Take in a key file that has changed; this may block."""
        if self.key is not None:
            self.key.read()

    def accepted(self, sock: socket.socket) -> socket.socket:
        """Return the socket to use for an accepted connection; with a key, its TLS handshake is still to be done."""
        if self.key is None:
            return sock
        return self.key.keys.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def dialled(self, sock: socket.socket) -> socket.socket:
        """Return the socket to use for a connection made from here; with a key, its TLS handshake is still to be done."""
        if self.key is None:
            return sock
        return self.key.keys.client.wrap_socket(sock, do_handshake_on_connect=False)

    def proved(self, sock: ssl.SSLSocket) -> str:
        """Return the short name of the key that the peer has proved in its handshake.

        Raises:
            ssl.SSLError: It is no accepted key (any more), as one for which an accepted key merely vouches.
        """
        name = key_id(sock.getpeercert(binary_form=True) or b"")
        if not self.accepts(name):
            error = ssl.SSLCertVerificationError(f"key {name} is not in the key file")
            error.verify_message = str(error)
            raise error
        return name

    def accepts(self, name: str) -> bool:
        """Return whether a key of this short name is accepted now."""
        return self.key is not None and name in self.key.keys.accepted

    def admits(self, host: str) -> bool:
        """Return whether a peer that connects from this address may, on any port of the list."""
        if self.peers is None:
            return True
        try:
            return allowed(Address(plain(host), 1), [portless(entry) for entry in self.peers])
        except IdentityError:
            return False

    def check_target(self, target: Address) -> None:
        """Refuse to dial an address that is not in the allow-list.

        Raises:
            PeerError: The address is not in the list.
        """
        if self.peers is not None and not allowed(target, self.peers):
            why = "it is not in the list of allowed peers; see the setting 'peers'"
            raise PeerError(why, kind=FailureKind.REFUSED)

    def check_host(self, host: str, met: str) -> None:
        """Refuse to have a back end dial a host that a peer tells.

        It must be an address. The list must cover it, on any port, unless the peer itself was met there: ``met`` is the address of the
        other end of its control connection.

        Raises:
            PeerError: It is a name, or neither.
        """
        if self.peers is None:
            if not is_ip(host.strip("[]")):
                raise PeerError(f"it would dial {host!r:.300}, which is no address", kind=FailureKind.REFUSED)
            return
        try:
            named = canonical_host(host)
            covered = is_ip(named) and (
                named == met or allowed(Address(named, 1), [portless(entry) for entry in self.peers])
            )
        except IdentityError:
            covered = False
        if not covered:
            why = f"it would dial {host!r:.300}, which is not in the list of allowed peers; see the setting 'peers'"
            raise PeerError(why, kind=FailureKind.REFUSED)

    def turned_away(self, host: str, why: str) -> None:
        """Log that a connection from this address was refused."""
        times = self._repeats.logged((host, why))
        if times is not None:
            key = "" if self.key is None else "; a peer that connects here needs a key that this engine accepts"
            more = f" (and {times} times before since this was last logged)" if times else ""
            _turned_away("turned away a connection from %s: %s%s%s", host, why, key, more)


OPEN = Security()
"""Neither key nor list: for tests, and for sockets that only this host can reach."""


def plain(address: str) -> str:
    """Return an address that a socket reported without its scope, and an IPv4-mapped one as IPv4."""
    return address.partition("%")[0].removeprefix("::ffff:")


def portless(entry: str) -> str:
    """Return an entry of the allow-list without its port, because peers connect from any port."""
    host, colon, port = entry.rpartition(":")
    named = colon and port.isdigit() and (host.endswith("]") or ":" not in host)
    return host if named else entry
