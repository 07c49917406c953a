"""What all messages have in common: their form, and the bounds of what they may hold.

The decoder checks every message of a peer against these, so that no other code meets numbers beyond them.
"""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from kvxfer.identity import Generation
from kvxfer.values import MAX_BANDS, MAX_DIGEST

PROTOCOL = 12
MAX_BYTES = 16 << 20
MAX_WORDS = 2000
MAX_PARTS = 1 << 16
MAX_RANKS = 1024
"""The most ranks of an engine."""
MAX_NAMES = 1000
"""The most transfers in one notice."""
NO_CHECKSUM = bytes(8)

Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
OfferGeneration = Annotated[Generation, Meta(ge=0, le=(1 << 63) - 1)]
Readers = Annotated[int, Meta(ge=0, le=MAX_RANKS)]
Part = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
Band = Annotated[int, Meta(ge=0, le=MAX_BANDS)]
Seconds = Annotated[float, Meta(ge=0, le=86400 * 30)]
Checksum = Annotated[bytes, Meta(min_length=8, max_length=8)]
Digest = Annotated[bytes, Meta(max_length=MAX_DIGEST)]


class WireMessage(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The form of every message: an array of its tag and its fields; unknown fields are refused."""


class _Reasoned(Protocol):
    @property
    def reason(self) -> str: ...


def shorten(message: _Reasoned) -> None:
    """Cut the reason in a message if it is too long to be read."""
    if len(message.reason) > MAX_WORDS:
        assert isinstance(message, msgspec.Struct)
        msgspec.structs.force_setattr(message, "reason", message.reason[:MAX_WORDS] + " [...]")
