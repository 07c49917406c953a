"""Encrypted connections: what goes over one is cut into *records*, of which nothing is believed before all of it has been checked.

A process has a pair of keys (X25519), made when it starts; the public one is told in endpoints alone. From both sides' keys, the
tokens of the link and the number of the connection come secrets for each of the connection's two directions (HKDF), so no key serves
two of them. A record is a head, which is its length, and the text under AES-256-GCM. Its nonce is its number, so that none can be
left out, sent again or moved to another place; the head is authenticated with it.
"""

from __future__ import annotations

import errno
import socket
import struct
from typing import TYPE_CHECKING

import numpy as np

from kvxfer.errors import ConfigError, TransportError
from kvxfer_tcp.endpoint import Endpoint
from kvxfer_tcp.vectors import IovecTable, Pipe, Pipes
from kvxfer_tcp.wire import Violation

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

RECORD_BYTES = 256 << 10
"""Most bytes of text in a record: what is copied, encrypted and sent while it is in a processor's cache."""

RECORDS_PER_KEY = 1 << 16
"""The records (16 GiB) after which a direction takes a new key, long before a key of AES-GCM is worn out."""

_HEAD = struct.Struct("<I")
_TAG_BYTES = 16
_SECRET_BYTES = 32


class Keys:
    """The keys of one transport, of which peers have to know the ``public`` one."""

    def __init__(self) -> None:
        """Make them.

        Raises:
            ConfigError: There is no library for that.
        """
        try:
            from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
        except ImportError as e:
            raise ConfigError(
                f"option 'encrypt' of back end 'tcp' needs cryptography ({e})",
                advice="in a checkout: pip install './backends/tcp[encrypt]'",
            ) from None
        self._private = X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()

    def pipes(self, mine: Endpoint, theirs: Endpoint) -> Pipes:
        """Return what makes the pipes of a link.

        Raises:
            TransportError: The peer's public key is none.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs.key))
        except ValueError as e:
            raise TransportError(f"{theirs.agent!r} sent no key for encryption: {e}") from None
        return _SealedPipes(shared, mine.token, theirs.token)


class _SealedPipes(Pipes):
    """Makes the pipes of a link whose two sides share a secret."""

    def __init__(self, shared: bytes, mine: bytes, theirs: bytes) -> None:
        self._shared, self._mine, self._theirs = shared, mine, theirs

    def dialled(self, opened: socket.socket, number: int, ahead: bytes) -> Pipe:
        asks, answers = self._secrets(self._theirs, self._mine, number)
        return _SealedPipe(opened, ahead, asks, answers)

    def accepted(self, opened: socket.socket, number: int) -> Pipe:
        asks, answers = self._secrets(self._mine, self._theirs, number)
        return _SealedPipe(opened, b"", answers, asks)

    def _secrets(self, listener: bytes, dialler: bytes, number: int) -> tuple[_Numbered, _Numbered]:
        """Return what encrypts from dialler to listener, and the way back."""
        told = b"kvxfer tcp connection" + listener + dialler + number.to_bytes(4, "big")
        both = _derive(self._shared, told, 2 * _SECRET_BYTES)
        return _Numbered(both[:_SECRET_BYTES]), _Numbered(both[_SECRET_BYTES:])


class _Numbered:
    """The keys and nonces of one direction of a connection."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._count = secret, 0
        self._cipher: AESGCM

    def next(self) -> tuple[AESGCM, bytes]:
        """Return key and nonce of the next record."""
        if self._count % RECORDS_PER_KEY == 0:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            both = _derive(self._secret, b"kvxfer tcp key", 2 * _SECRET_BYTES)
            self._secret, self._cipher = both[:_SECRET_BYTES], AESGCM(both[_SECRET_BYTES:])
        nonce = self._count.to_bytes(12, "big")
        self._count += 1
        return self._cipher, nonce


def _derive(secret: bytes, what: bytes, nbytes: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), nbytes, None, what).derive(secret)


class _SealedPipe(Pipe):
    """A pipe that encrypts. What it was given to send is a copy by then: memory may be taken back though it has not left."""

    def __init__(self, connection: socket.socket, ahead: bytes, out: _Numbered, come: _Numbered) -> None:
        super().__init__(connection, ahead)
        self._out, self._come = out, come
        self._head: bytes | None = None
        self._part, self._got = np.empty(_HEAD.size, np.uint8).data, 0
        self._text = memoryview(b"")

    @property
    def held(self) -> int:
        return self._got + (0 if self._head is None else _HEAD.size)

    def send(self, table: IovecTable, lo: int, hi: int) -> int:
        return self._seal(table.gather(lo, hi, RECORD_BYTES)) if self.flush() else -1

    def write(self, data: bytes | bytearray) -> int:
        return self._seal(data[:RECORD_BYTES]) if self.flush() else -1

    def receive(self, table: IovecTable, lo: int, hi: int) -> int:
        return self._drop(table.scatter(lo, hi, self._text)) if self._fill() else -1

    def discard(self, nbytes: int) -> int:
        return self._drop(min(nbytes, len(self._text))) if self._fill() else -1

    def read(self, nbytes: int) -> bytes | None:
        if not self._fill():
            return None
        data = bytes(self._text[:nbytes])
        self._drop(len(data))
        return data

    def _seal(self, text: bytes | bytearray | memoryview) -> int:
        head = _HEAD.pack(len(text))
        cipher, nonce = self._out.next()
        self.unsent = [memoryview(head), memoryview(cipher.encrypt(nonce, text, head))]
        self.flush()
        return len(text)

    def _drop(self, nbytes: int) -> int:
        # Of a record that is done with, nothing is kept: there may be a thousand idle connections.
        self._text = self._text[nbytes:] if nbytes < len(self._text) else memoryview(b"")
        return nbytes

    def _fill(self) -> bool:
        """Process what has come, up to the end of a record; returns whether there is text."""
        while not self._text:
            try:
                count = self.socket.recv_into(self._part[self._got :])
            except BlockingIOError:
                return False
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "closed by the other side")
            self._got += count
            if self._got == len(self._part):
                self._take()
        return True

    def _take(self) -> None:
        """Go on from the head that has come, or the text."""
        following = _HEAD.size
        if self._head is None:
            self._head = bytes(self._part)
            [nbytes] = _HEAD.unpack(self._head)
            if not 0 < nbytes <= RECORD_BYTES:
                raise Violation(f"a record of {nbytes} bytes")
            following = nbytes + _TAG_BYTES
        else:
            self._text, self._head = memoryview(self._open(self._head)), None
        self._part, self._got = np.empty(following, np.uint8).data, 0

    def _open(self, head: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        cipher, nonce = self._come.next()
        try:
            return cipher.decrypt(nonce, self._part, head)
        except InvalidTag:
            raise Violation("what came was changed on its way, or encrypted with another key") from None
