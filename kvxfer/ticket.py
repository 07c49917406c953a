"""Tickets: everything that a consumer must be told of a transfer, as one text that any router can carry."""

from __future__ import annotations

import zlib
from base64 import b64decode, urlsafe_b64encode
from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer import arguments
from kvxfer.errors import UNREADABLE, ArgumentError
from kvxfer.identity import Handle, Source, TransferId
from kvxfer.values import MAX_DIGEST, MAX_TOKENS, BlockTable, Fetch

__all__ = ["Ticket"]

_VERSION = "kvxfer1."
_LONGEST = 1 << 16
_SUM_BYTES = 4


class Ticket(msgspec.Struct, frozen=True):
    """What a consumer must be told about a transfer by whatever routes the request.

    Its ``text`` is opaque and holds only letters, digits and ``-_.=``. So JSON, headers and URLs carry it unchanged, as do
    programs that cannot hold integers beyond 2**53. A checksum shows whether it was cut or altered on the way; it does not
    prove who made it.

    Attributes:
        transfer: The name of the transfer.
        digest: What its KV depends on, 1 to 64 bytes. A consumer that knows the prompt compares it with its own.
        source: The directory of the engine that offers it.
        tokens: How many tokens it has; 0: not said, as in tickets of earlier versions.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    transfer: TransferId
    digest: Annotated[bytes, Meta(max_length=MAX_DIGEST)]
    source: Source
    tokens: int = 0

    def __post_init__(self) -> None:
        arguments.instance("transfer", self.transfer, TransferId)
        arguments.bytes_of("digest", self.digest, MAX_DIGEST)
        arguments.instance("source", self.source, Source)
        msgspec.structs.force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 0, MAX_TOKENS))

    @property
    def text(self) -> str:
        """The ticket as a text, for ``read``."""
        body = msgspec.msgpack.encode(self)
        return _VERSION + urlsafe_b64encode(zlib.crc32(body).to_bytes(_SUM_BYTES) + body).decode()

    @classmethod
    def read(cls, text: str) -> Ticket:
        """Return the ticket with this text.

        Raises:
            ArgumentError: The text is not a ticket, is one of another version, or was altered on its way.
        """
        arguments.string("ticket", text, _LONGEST)
        if not text.startswith(_VERSION):
            raise ArgumentError(f"ticket must begin with {_VERSION!r}, as those of this version do, not {text[:20]!r}")
        try:
            raw = b64decode(text.removeprefix(_VERSION), b"-_", validate=True)
            whole = zlib.crc32(raw[_SUM_BYTES:]).to_bytes(_SUM_BYTES) == raw[:_SUM_BYTES]
            found = msgspec.msgpack.decode(raw[_SUM_BYTES:], type=cls) if whole else None
        except (ValueError, *UNREADABLE):
            found = None
        if found is None:
            raise ArgumentError("ticket must be as it was made: this one was cut or altered on its way")
        return found

    def fetch(
        self,
        handle: Handle,
        blocks: BlockTable,
        start: int,
        tokens: int,
        own: Source | None = None,
        offered: bool = False,
    ) -> Fetch:
        """Return a fetch of the tokens ``[start, tokens)`` of this transfer into these blocks; see ``Fetch``."""
        return Fetch(handle, self.transfer, self.digest, self.source, blocks, start, tokens, own, offered)
