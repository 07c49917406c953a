"""Key files: PEM text that holds the keys which an engine presents and accepts, one after the other.

A *key* is a private key followed by its own self-signed certificate, or the certificate alone. An engine presents the first
private key of its file. It accepts a peer that proves to hold the private key of a certificate in the file. So one form serves a key
that all engines share, two of them while one replaces the other, and one key for each engine.
"""

from __future__ import annotations

import binascii
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvxfer.errors import ConfigError

_BEGIN = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----")
_END = re.compile(r"-----END ([A-Z0-9 ]+)-----")
_CERTIFICATE = "CERTIFICATE"
_ID_DIGITS = 16


def key_id(certificate: bytes) -> str:
    """Return the short name of a key: the same everywhere, and not to be forged for another key's certificate (in DER)."""
    return hashlib.sha256(certificate).hexdigest()[:_ID_DIGITS]


@dataclass(frozen=True)
class Key:
    """One key of a file."""

    id: str  # its short name
    certificate: str  # its certificate, as PEM
    secret: str | None  # its private key, as PEM; ``None`` where the file does not hold it
    line: int  # where it begins in the file
    certificate_line: int  # where its certificate begins

    @property
    def text(self) -> str:
        """The key as a file holds it."""
        return (self.secret or "") + self.certificate


@dataclass(frozen=True)
class KeyFile:
    """The keys of a file, each once."""

    keys: tuple[Key, ...]

    @classmethod
    def parse(cls, text: str) -> KeyFile:
        """Read the text of a key file. What certificates and private keys say is not checked.

        Raises:
            ConfigError: It is malformed; the message says in which line, and what to do.
        """
        if text.startswith("kvxfer-key-1"):
            raise ConfigError("it is a key of an earlier version; make one with `kvxfer keys FILE`")
        found: dict[str, Key] = {}
        pending: tuple[str, int] | None = None
        for label, block, line in _blocks(text):
            if label != _CERTIFICATE:
                if pending is not None:
                    raise _orphan(pending[1])
                pending = block, line
                continue
            secret, begins = pending or (None, line)
            pending = None
            key = Key(key_id(_der(block, line)), block, secret, begins, line)
            if key.id not in found or found[key.id].secret is None:
                found[key.id] = key
        if pending is not None:
            raise _orphan(pending[1])
        return cls(tuple(found.values()))

    @property
    def own(self) -> Key | None:
        """The key that an engine with this file presents; ``None`` if the file holds no private key."""
        return next((key for key in self.keys if key.secret is not None), None)

    @property
    def text(self) -> str:
        return "".join(key.text for key in self.keys)

    def find(self, name: str) -> Key:
        """Return the key whose short name begins like this.

        Raises:
            ConfigError: None has such a name, or several have.
        """
        found = [key for key in self.keys if key.id.startswith(name.lower())] if name else []
        if len(found) != 1:
            these = ", ".join(key.id for key in self.keys)
            raise ConfigError(
                f"{len(found)} keys of the file have a name that begins with {name!r}; its keys are {these}"
            )
        return found[0]

    def accept(self, more: KeyFile) -> KeyFile:
        """Return these keys, and after them the others that are not among them."""
        known = {key.id for key in self.keys}
        return KeyFile(self.keys + tuple(key for key in more.keys if key.id not in known))

    def first(self, key: Key) -> KeyFile:
        """Return these keys with this one first, to be presented.

        Raises:
            ConfigError: The file does not hold its private key.
        """
        if key.secret is None:
            raise ConfigError(f"key {key.id} cannot be presented: the file holds its certificate but no private key")
        return KeyFile((key, *(other for other in self.keys if other is not key)))

    def drop(self, key: Key) -> KeyFile:
        """Return these keys without this one.

        Raises:
            ConfigError: No private key would be left.
        """
        left = KeyFile(tuple(other for other in self.keys if other is not key))
        if left.own is None:
            raise ConfigError(f"key {key.id} is the only private key of the file: add another one before you drop it")
        return left


def _blocks(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield label, text and first line of each PEM block.

    Raises:
        ConfigError: There is something else than blocks, comments and empty lines, or a block of another kind.
    """
    label, begins = "", 0
    body: list[str] = []  # with the comments before it, which stay with their key
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        begin, end = _BEGIN.fullmatch(line), _END.fullmatch(line)
        if not label:
            if begin:
                label, begins = begin[1], number
                _check_label(label, number)
                body.append(line)
            elif line.startswith("#"):
                body.append(line)
            elif line:
                raise ConfigError(
                    f"line {number} is neither part of a key nor a comment: put each -----BEGIN and -----END on a line of its "
                    "own, and a # before comments"
                )
        elif begin or (end and end[1] != label):
            break
        else:
            body.append(line)
            if ":" in line:
                raise ConfigError(
                    f"line {number} belongs to a private key that is encrypted: an engine cannot ask for its passphrase; "
                    "write it without one"
                )
            if end:
                yield label, "\n".join(body) + "\n", begins
                label, body = "", []
    if label:
        raise ConfigError(
            f"the {label.lower()} that begins in line {begins} is cut off: copy it whole, to its -----END"
        )


def _check_label(label: str, line: int) -> None:
    if "ENCRYPTED" in label:
        raise ConfigError(
            f"the private key in line {line} is encrypted: an engine cannot ask for its passphrase; write it without one"
        )
    if label != _CERTIFICATE and not label.endswith("PRIVATE KEY"):
        raise ConfigError(
            f"line {line} begins a {label.lower()}: only private keys and certificates are used here; take it out"
        )


def _orphan(line: int) -> ConfigError:
    return ConfigError(
        f"the private key that begins in line {line} is not followed by its certificate: copy whole keys, as "
        "`kvxfer keys` writes them"
    )


def _der(block: str, line: int) -> bytes:
    try:
        text = "".join(line for line in block.splitlines() if line[0] not in "#-")
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise damaged(line) from None


def damaged(line: int) -> ConfigError:
    """Return the error of a certificate that cannot be read."""
    return ConfigError(f"the certificate that begins in line {line} is damaged: copy it again")
