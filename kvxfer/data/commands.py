"""What the control thread asks of the data threads, and what they answer: one value for each.

Most commands are actions of the protocol's machines, passed on as they are. Words about the pieces of a staged part go either
way: what one data thread says of a piece reaches the peer's, by way of both control threads, as a command.
"""

from __future__ import annotations

import msgspec

from kvxfer.failures import Failure
from kvxfer.protocol.values import Abort, LinkId, Move, Moved, PartRef, RemoteWritesEnded, Role

__all__ = [
    "Command",
    "Connect",
    "Connected",
    "Disconnect",
    "Disconnected",
    "EndpointMade",
    "LinkBroken",
    "LinkNews",
    "MakeEndpoint",
    "PieceNews",
    "PieceReady",
    "PieceTaken",
    "Reset",
    "Result",
    "Stop",
    "ThreadDied",
]


class MakeEndpoint(msgspec.Struct, frozen=True):
    """Begin a link, in the attempt of this number; answered with ``EndpointMade``."""

    link: LinkId
    number: int
    backend: str
    role: Role


class EndpointMade(msgspec.Struct, frozen=True):
    """The bytes for the peer, or why there are none."""

    link: LinkId
    number: int
    endpoint: bytes
    failure: Failure | None = None


class Connect(msgspec.Struct, frozen=True):
    """Make the link of these two endpoints; answered with ``Connected``."""

    link: LinkId
    number: int
    mine: bytes
    theirs: bytes


class Connected(msgspec.Struct, frozen=True):
    """Whether the link is made, and if not, why."""

    link: LinkId
    number: int
    failure: Failure | None = None


class LinkBroken(msgspec.Struct, frozen=True):
    """A link on which nothing can move any more, though nobody asked to close it."""

    link: LinkId
    number: int
    failure: Failure


class Disconnect(msgspec.Struct, frozen=True):
    """Close a link, whatever has become of it; answered with ``Disconnected``."""

    link: LinkId


class Disconnected(msgspec.Struct, frozen=True):
    """Nothing comes over the link into our memory any more."""

    link: LinkId


class PieceReady(msgspec.Struct, frozen=True):
    """There is a slot for a piece.

    From the producer: the piece lies packed in its staging memory, to be read; or it is on its way, where it is sent; or it
    has been written into the slot that was lent. From the consumer: a slot to write it into.

    Attributes:
        offset: Where the slot begins in staging memory, in bytes; ``None`` where the other side need not know.
    """

    ref: PartRef
    piece: int
    offset: int | None
    nbytes: int


class PieceTaken(msgspec.Struct, frozen=True):
    """Staged read: the consumer has copied a piece out of the producer's staging memory."""

    ref: PartRef
    piece: int


class Reset(msgspec.Struct, frozen=True):
    """The back end has been closed and made anew: its links are void, and all memory is quiet."""

    backend: str
    failure: Failure


class ThreadDied(msgspec.Struct, frozen=True):
    """A thread that must not end has ended: nothing that it was given will be answered."""

    failure: Failure


class Stop(msgspec.Struct, frozen=True):
    """End everything; nothing is taken in after it."""


PieceNews = PieceReady | PieceTaken
LinkNews = EndpointMade | Connected | LinkBroken
Command = MakeEndpoint | Connect | Disconnect | Move | Abort | RemoteWritesEnded | PieceReady | PieceTaken | Stop
Result = EndpointMade | Connected | LinkBroken | Disconnected | Moved | PieceReady | PieceTaken | Reset | ThreadDied
