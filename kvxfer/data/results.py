"""What the data thread tells the control thread."""

from __future__ import annotations

from dataclasses import dataclass

from kvxfer.failures import Failure
from kvxfer.protocol.values import LinkId, Moved, PartRef

__all__ = ["Broken", "Connected", "Died", "Disconnected", "EndpointMade", "Reset", "Result", "PieceReady", "PieceTaken"]


@dataclass(frozen=True)
class EndpointMade:
    """Answer to ``endpoint``: the bytes for the peer, or why there are none."""

    link: LinkId
    number: int
    endpoint: bytes
    failure: Failure | None = None


@dataclass(frozen=True)
class Connected:
    """Answer to ``connect``."""

    link: LinkId
    number: int
    failure: Failure | None = None


@dataclass(frozen=True)
class Broken:
    """A link on which nothing can move any more, though nobody asked to close it."""

    link: LinkId
    number: int
    failure: Failure


@dataclass(frozen=True)
class Disconnected:
    """Answer to ``disconnect``: nothing comes over the link into our memory any more."""

    link: LinkId


@dataclass(frozen=True)
class PieceReady:
    """What the peer is to be told of a piece.

    By a producer: the piece lies packed in our staging memory, to be read; or it is on its way, where it is sent; or it
    is written into the slot that was lent. By a consumer: a slot to write it into.
    """

    ref: PartRef
    piece: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class PieceTaken:
    """Staged read: we have copied a piece out of the peer's staging memory."""

    ref: PartRef
    piece: int


@dataclass(frozen=True)
class Reset:
    """The back end was closed and made anew: all links are void, all memory is quiet."""

    backend: str
    failure: Failure


@dataclass(frozen=True)
class Died:
    """A thread has ended that must not: nothing that it was given will be answered any more."""

    failure: Failure


Result = EndpointMade | Connected | Broken | Disconnected | Moved | PieceReady | PieceTaken | Reset | Died
