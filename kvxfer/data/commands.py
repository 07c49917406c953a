"""What the data plane is asked and what it tells: one value for each, between the control thread and the data threads.

Most commands are what the protocol's machines ask for, as it is. What is said of the pieces of a staged part goes either
way: what one data thread tells of a piece is, by way of both control threads, a command to the peer's.
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
    """Begin a link; answered with ``EndpointMade``.

    Attributes:
        number: Tells this making of the link from earlier ones.
        backend: The back end's name.
        role: Ours on the link.
    """

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
    """The link is made, or it is not, and why."""

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
    """The back end was closed and is made anew: all links are void, all memory is quiet."""

    backend: str
    failure: Failure


class ThreadDied(msgspec.Struct, frozen=True):
    """A thread has ended that must not: nothing that it was given will be answered any more."""

    failure: Failure


class Stop(msgspec.Struct, frozen=True):
    """End everything; nothing is taken in after it."""


PieceNews = PieceReady | PieceTaken
LinkNews = EndpointMade | Connected | LinkBroken
Command = MakeEndpoint | Connect | Disconnect | Move | Abort | RemoteWritesEnded | PieceReady | PieceTaken | Stop
Result = EndpointMade | Connected | LinkBroken | Disconnected | Moved | PieceReady | PieceTaken | Reset | ThreadDied
