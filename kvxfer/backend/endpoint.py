"""Endpoints as bytes, with the back end's name, a format version and a checksum."""

from __future__ import annotations

import secrets
import threading
import zlib
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Self, TypeVar

import msgspec

from kvxfer.errors import UNREADABLE, TransportError
from kvxfer.transport.contract import MAX_ENDPOINT

__all__ = ["TOKEN_BYTES", "EndpointBase", "Token", "check_encryption", "new_token"]

TOKEN_BYTES = 16

Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]
"""A secret of one end of a link, known only to the two ends: the end that dials sends it before anything else."""

_CHECK_BYTES = 4

T = TypeVar("T", bound="EndpointBase")


def new_token() -> bytes:
    """Return a new ``Token``."""
    return secrets.token_bytes(TOKEN_BYTES)


class EndpointBase(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one side of a link tells the other, checked when it is read.

    A subclass must be frozen too, set ``backend`` to the name of its back end, and change ``format`` whenever its content
    changes. Give its fields types and limits that msgspec can check.

    Attributes:
        agent: The agent's name, for messages.
        most_bytes: The largest size when encoded; no more than ``Transport.endpoint`` promises.
        trusted: The fields that the back end's library takes on trust, because nothing can check them. The conformance suite does not
            forge them; the back end's page must say what a hostile peer can do with them.
    """

    backend: ClassVar[str]
    format: ClassVar[int]
    most_bytes: ClassVar[int] = MAX_ENDPOINT
    trusted: ClassVar[frozenset[str]] = frozenset()

    agent: str

    @property
    def hosts(self) -> Collection[str]:
        """The hosts that a peer dials because of this endpoint; a subclass that names some must say so."""
        return ()

    def encode(self) -> bytes:
        """Return the endpoint as bytes.

        Raises:
            TransportError: It takes more than ``most_bytes``.
        """
        said = f"{self.backend} {self.format} ".encode() + msgspec.msgpack.encode(self)
        if len(said) + _CHECK_BYTES > self.most_bytes:
            raise TransportError(
                f"the endpoint of back end {self.backend!r} takes {len(said)} bytes, more than {self.most_bytes}",
                advice="register fewer, longer regions",
            )
        return said + _check(said)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read an endpoint.

        Raises:
            TransportError: The bytes were not made by ``encode`` of this class.
        """
        said = data[:-_CHECK_BYTES]
        if len(data) > cls.most_bytes or data[-_CHECK_BYTES:] != _check(said):
            raise TransportError(
                f"these bytes are not an endpoint of back end {cls.backend!r}, or were altered on their way"
            )
        name, format_, packed = (said.split(b" ", 2) + [b"", b""])[:3]
        if name != cls.backend.encode():
            other = name[:32].decode("ascii", "replace")
            raise TransportError(f"these bytes are an endpoint of back end {other!r}, not of {cls.backend!r}")
        if format_ != str(cls.format).encode():
            raise TransportError(
                f"the peer's endpoint of back end {cls.backend!r} has format {format_[:32].decode('ascii', 'replace')}, this side's "
                f"{cls.format}",
                advice="install the same release of it on both",
            )
        try:
            return _decoder(cls).decode(packed)
        except UNREADABLE as e:
            raise TransportError(f"these bytes are not an endpoint of back end {cls.backend!r}: {e}") from None


_building = threading.Lock()
_decoders: dict[type[EndpointBase], msgspec.msgpack.Decoder[Any]] = {}


def check_encryption(theirs: EndpointBase, here: bool, there: bool) -> None:
    """Check that both sides of a link encrypt (``here``, ``there``), or neither does.

    Raises:
        TransportError: Only one does.
    """
    if here != there:
        does, does_not = ("this side", f"{theirs.agent!r}") if here else (f"{theirs.agent!r}", "this side")
        raise TransportError(
            f"{does} encrypts and {does_not} does not",
            advice=f"set option 'encrypt' of back end {theirs.backend!r} to the same value on both",
        )


def _decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return the decoder of a class, made once.

    msgspec analyses a class when it is first decoded; another thread that decodes it meanwhile crashes the process
    (0.22.0, in ``mpack_decode``), and a process with several agents has several data threads.
    """
    with _building:
        if kind not in _decoders:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
        return _decoders[kind]


def _check(said: bytes) -> bytes:
    return zlib.crc32(said).to_bytes(_CHECK_BYTES)
