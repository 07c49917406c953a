"""What the process that decodes must be told of a batch, as one text."""

from __future__ import annotations

import base64

import msgspec

from kvxfer import ArgumentError, Ticket

__all__ = ["BatchTicket"]

_BEGINS = "kvxfer-transformers-1."


class BatchTicket(msgspec.Struct, frozen=True):
    """One batch of prompts whose KV is offered.

    Attributes:
        rows: For each row of the batch what is offered of it; ``None`` for one of a single token, which has no KV to move.
        tokens: Columns of the batch that the KV covers, padding included.
        tail: For each row the ids behind those columns: what the prefill side has computed no KV of.
    """

    rows: tuple[Ticket | None, ...]
    tokens: int
    tail: tuple[tuple[int, ...], ...]

    @property
    def text(self) -> str:
        """Letters, digits and ``-_.=``, so that JSON, headers and URLs carry it unchanged."""
        return _BEGINS + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def read(cls, text: str) -> BatchTicket:
        """Return the ticket with this text.

        Raises:
            ArgumentError: It is none, or of another version.
        """
        if not isinstance(text, str) or not text.startswith(_BEGINS):
            raise ArgumentError(f"ticket must be a text that offer() returned, beginning with {_BEGINS!r}")
        try:
            found = msgspec.msgpack.decode(base64.urlsafe_b64decode(text.removeprefix(_BEGINS)), type=cls)
        except (ValueError, msgspec.MsgspecError) as error:
            raise ArgumentError(f"ticket must be as offer() returned it: {error}") from None
        behind = {len(row) for row in found.tail}
        if len(found.rows) != len(found.tail) or len(behind) != 1 or not min(behind) or found.tokens < 0:
            raise ArgumentError("ticket must be as offer() returned it: its rows do not fit each other")
        return found
