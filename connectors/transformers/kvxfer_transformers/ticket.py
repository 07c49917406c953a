"""The ticket of a batch: what the process that decodes must be told, as one text."""

from __future__ import annotations

import base64

import msgspec

from kvxfer import ArgumentError, Ticket
from kvxfer.errors import UNREADABLE

__all__ = ["BatchTicket"]

_BEGINS = "kvxfer-transformers-1."


class BatchTicket(msgspec.Struct, frozen=True):
    """One batch of prompts whose KV is offered."""

    # for each row of the batch, the ticket of its offer; ``None`` for a row of a single token, which has no KV to move
    rows: tuple[Ticket | None, ...]
    tokens: int  # the columns of the batch that the KV covers, padding included
    tail: tuple[tuple[int, ...], ...]  # for each row, the ids after those columns, of which the prefill side has no KV

    @property
    def text(self) -> str:
        """The ticket as letters, digits and ``-_.=``, which JSON, headers and URLs carry unchanged."""
        return _BEGINS + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def read(cls, text: str) -> BatchTicket:
        """Return the ticket with this text.

        Raises:
            ArgumentError: The text is not a ticket, or one of another version.
        """
        if not isinstance(text, str) or not text.startswith(_BEGINS):
            raise ArgumentError(f"ticket must be a text that offer() returned, beginning with {_BEGINS!r}")
        try:
            found = msgspec.msgpack.decode(base64.urlsafe_b64decode(text.removeprefix(_BEGINS)), type=cls)
        except (ValueError, *UNREADABLE) as error:
            raise ArgumentError(f"ticket must be as offer() returned it: {error}") from None
        behind = {len(row) for row in found.tail}
        if len(found.rows) != len(found.tail) or len(behind) != 1 or not min(behind) or found.tokens < 0:
            raise ArgumentError("ticket must be as offer() returned it: its rows do not fit each other")
        return found
