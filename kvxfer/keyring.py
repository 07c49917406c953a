"""The keys of a file, ready for TLS, and read again when the file has changed.

Any thread may use them. A file that has become unusable changes nothing: the keys that were read before stay, and the error is logged once.
"""

from __future__ import annotations

import os
import ssl
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

from kvxfer import clock
from kvxfer.errors import ConfigError
from kvxfer.keyfile import Key, KeyFile, damaged
from kvxfer.logs import logger
from kvxfer.settings import read_file

log = logger("kvxfer.security")

SETTLES_S = 2.0
"""A file that was written within these seconds is read at each look, because another write may leave its time and size the same."""
BROKEN_S = 1.0
"""Seconds for which a changed file may be unusable before that is logged: it may be being written."""


@dataclass(frozen=True)
class KeySet:
    """The keys of a file as they were at one time."""

    own: str  # the short name of the key that this engine presents
    accepted: frozenset[str]  # the short names of the keys that peers may prove
    server: ssl.SSLContext  # for connections that peers make
    client: ssl.SSLContext  # for connections that are made from here

    @classmethod
    def of(cls, file: KeyFile) -> KeySet:
        """Make the contexts.

        Raises:
            ConfigError: There is no private key, or one does not belong to its certificate.
        """
        own = file.own
        if own is None:
            raise ConfigError("it holds no private key: put the engine's own key, as `kvxfer keys` writes it, in front")
        scratch = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for key in file.keys:
            if key.secret is not None:
                _present(scratch, key)
        accepted = frozenset(key.id for key in file.keys)
        server, client = (_context(side, own, file) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        return cls(own.id, accepted, server, client)


class KeyRing:
    """The keys of one file, which is read again on request.

    Raises:
        ConfigError: The file holds no usable key.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._rights = 0
        self._seen: tuple[int, ...] | None  # the file when it was last read; None: read it again
        self._text: str | None  # what it held then
        self._seen, self._text = self._read()
        self.keys = KeySet.of(KeyFile.parse(self._text))
        self._broken: str | None = None  # why it cannot be used
        self._since: float | None = None  # from when on, until that has been logged

    @property
    def fresh(self) -> bool:
        """Whether the file is as it was when it was last read, so that ``read`` need not be called."""
        try:
            return self._since is None and self._seen is not None and _identity(self._path.stat()) == self._seen
        except OSError:
            return self._seen is None and self._broken is not None and self._since is None

    def read(self) -> None:
        """Read the file again if it has changed; this may block."""
        with self._lock:
            try:
                self._look()
            except OSError as e:
                self._seen = self._text = None
                self._break(e.strerror or str(e))
            except ConfigError as e:
                self._break(str(e))
            if self._since is not None and clock.now() - self._since >= BROKEN_S:
                self._since = None
                log.error(
                    "cannot use the key file %s: %s. The keys that were read before stay in use",
                    self._path,
                    self._broken,
                )

    def _look(self) -> None:
        self._seen, text = self._read()
        if text == self._text:
            return
        self._text = text
        before, self.keys = self.keys, KeySet.of(KeyFile.parse(text))
        self._broken = self._since = None
        says = [f"presents key {self.keys.own}"]
        new, gone = self.keys.accepted - before.accepted, before.accepted - self.keys.accepted
        says += [
            f"{verb} {', '.join(sorted(ids))}"
            for verb, ids in (("also accepts", new), ("no longer accepts", gone))
            if ids
        ]
        log.info("the key file %s has changed: this engine %s", self._path, ", ".join(says))

    def _break(self, why: str) -> None:
        if why != self._broken:
            self._broken, self._since = why, clock.now()

    def _read(self) -> tuple[tuple[int, ...] | None, str]:
        """Return what tells this state of the file from others, ``None`` if nothing does yet, and its text."""
        data, status = read_file(self._path)
        self._warn(status.st_mode)
        settled = abs(time.time() - status.st_mtime) > SETTLES_S
        return (_identity(status) if settled else None), data.decode(errors="replace")

    def _warn(self, mode: int) -> None:
        """Warn of rights by which others can use the private keys, or add keys of their own."""
        rights = mode & 0o066
        if rights & ~self._rights:
            for who, shift in (("its group", 3), ("every user of this host", 0)):
                does = [verb for verb, bit in (("read", 4), ("changed", 2)) if rights >> shift & bit]
                if does:
                    log.warning("the key file %s can be %s by %s; chmod 600 it", self._path, " and ".join(does), who)
        self._rights = rights


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _context(side: int, own: Key, file: KeyFile) -> ssl.SSLContext:
    """Return a TLS context that presents one key, and accepts those of a file and no other.

    Raises:
        ConfigError: A certificate is damaged.
    """
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # a peer is known by its key, not by a name
    context.verify_mode = ssl.CERT_REQUIRED
    # Each certificate is trusted as itself. Without this, OpenSSL takes the first with the same subject for the issuer.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _present(context, own)
    try:
        with _file("".join(key.certificate for key in file.keys)) as path:
            # As text it would keep other threads from running for a second, if it is long.
            context.load_verify_locations(path)
    except ssl.SSLError:
        raise damaged(_first_damaged(file)) from None
    if side == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # no resumption: each connection proves the key again
    return context


def _present(context: ssl.SSLContext, key: Key) -> None:
    """Have a context present a key.

    Raises:
        ConfigError: Its private key is damaged, or belongs to another certificate.
    """
    try:
        with _file(key.text) as path:
            context.load_cert_chain(path, password="")
    except (OSError, ValueError):
        raise ConfigError(
            f"the private key that begins in line {key.line} is damaged, or does not belong to the certificate after it: "
            "copy whole keys, as `kvxfer keys` writes them"
        ) from None


def _first_damaged(file: KeyFile) -> int:
    for key in file.keys:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=key.certificate)
        except ssl.SSLError:
            return key.certificate_line
    return 1


@contextmanager
def _file(text: str) -> Iterator[str]:
    """Yield the path of a file in memory with this text, because ``ssl`` reads private keys from files only."""
    descriptor = os.memfd_create("kvxfer-key", os.MFD_CLOEXEC)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode())
        file.flush()
        yield f"/proc/self/fd/{descriptor}"


_rings: WeakValueDictionary[Path, KeyRing] = WeakValueDictionary()
_rings_lock = threading.Lock()


def read_keys(path: Path) -> KeyFile:
    """Return the keys of a file.

    Raises:
        ConfigError: The file cannot be read, or is malformed; the message says where, and what to do.
    """
    try:
        return KeyFile.parse(read_file(path)[0].decode(errors="replace"))
    except OSError as e:
        raise ConfigError(f"cannot read the key {str(path)!r}: {e.strerror}") from None
    except ConfigError as e:
        raise ConfigError(f"cannot use the key file {str(path)!r}: {e}") from None


def write_keys(path: Path, keys: KeyFile) -> None:
    """Replace a key file, at once, so that no engine reads half of it. Its owner and rights stay.

    Raises:
        ConfigError: The keys are not usable, or the file cannot be written.
    """
    KeySet.of(keys)
    there = path.resolve()
    new = there.with_name(f".{there.name}.{os.getpid()}")
    try:
        status = there.stat()
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(keys.text)
            if (status.st_uid, status.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
            file.flush()
            os.fsync(descriptor)
        new.replace(there)
    except OSError as e:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write the key file {str(path)!r}: {e.strerror}; nothing of it has changed") from None


def keyring(path: Path) -> KeyRing:
    """Return the keys of a file, the same ring for all of this process.

    Raises:
        ConfigError: The file cannot be read, or holds no usable key; the message says where, and what to do.
    """
    with _rings_lock:
        ring = _rings.get(path)
        if ring is None:
            try:
                ring = _rings[path] = KeyRing(path)
            except OSError as e:
                raise ConfigError(f"cannot read the key {str(path)!r}: {e.strerror}") from None
            except ConfigError as e:
                raise ConfigError(f"cannot use the key file {str(path)!r}: {e}") from None
    return ring
