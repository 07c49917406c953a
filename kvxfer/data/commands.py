"""The commands of the control thread to the data threads, and their results.

Most commands are actions of the protocol's machines, passed on as they are. Messages about the slots of a staged part go both
ways: what one data thread says of a slot reaches the peer's data thread, through both control threads, as a command.
"""

from __future__ import annotations

import msgspec

from kvxfer.failures import Failure
from kvxfer.protocol import messages as m
from kvxfer.protocol.peer import NOBODY, PeerIdentity
from kvxfer.protocol.values import Abort, LinkId, Move, Moved, Moving, PartRef, RemoteWritesEnded, Role

SlotMessage = m.SlotReady | m.SlotFree


class MakeEndpoint(msgspec.Struct, frozen=True):
    """Begin a link, in the attempt with this number; answered with ``EndpointMade``."""

    link: LinkId
    number: int
    backend: str
    role: Role


class EndpointMade(msgspec.Struct, frozen=True):
    """The endpoint for the peer, or why there is none."""

    link: LinkId
    number: int
    endpoint: bytes
    failure: Failure | None = None


class Connect(msgspec.Struct, frozen=True):
    """Make the link between these two endpoints; answered with ``Connected``."""

    link: LinkId
    number: int
    mine: bytes
    theirs: bytes
    host: str = ""  # the address of the other end of the link's control connection, which the back end may dial as well
    control: bytes | None = b""  # what names that connection to both its ends (``Transport.connect_over``)
    owner: PeerIdentity = NOBODY  # the peer that the link counts for, if that dialled


class Connected(msgspec.Struct, frozen=True):
    """Whether the link is made, and if not, why."""

    link: LinkId
    number: int
    failure: Failure | None = None


class LinkBroken(msgspec.Struct, frozen=True):
    """Nothing can move over a link any more, although nobody asked to close it."""

    link: LinkId
    number: int
    failure: Failure


class Disconnect(msgspec.Struct, frozen=True):
    """Close a link, in whatever state it is; answered with ``Disconnected``."""

    link: LinkId


class Disconnected(msgspec.Struct, frozen=True):
    """Nothing comes over the link into memory here any more, unless its back end could not be closed (``DataThread.exposes``)."""

    link: LinkId


class SlotNews(msgspec.Struct, frozen=True):
    """A message about a slot of a staged part: to the peer as a result, from the peer as a command."""

    ref: PartRef
    said: SlotMessage


class Reset(msgspec.Struct, frozen=True):
    """The back end has been closed and made again: its links are void, and each part has ended."""

    backend: str
    failure: Failure


class ThreadDied(msgspec.Struct, frozen=True):
    """A thread that must not end has ended, and will not answer what it was given."""

    failure: Failure


class Stop(msgspec.Struct, frozen=True):
    """End everything; no command is taken after it."""


LinkNews = EndpointMade | Connected | LinkBroken
Command = MakeEndpoint | Connect | Disconnect | Move | Abort | RemoteWritesEnded | SlotNews | Stop
Result = EndpointMade | Connected | LinkBroken | Disconnected | Moved | Moving | SlotNews | Reset | ThreadDied
