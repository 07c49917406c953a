"""The inputs and outputs of the protocol's state machines: values only, no sockets, no threads, no clock."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from kvxfer.config import Integrity
from kvxfer.failures import Failure, Outcome
from kvxfer.geometry import CopyPlan, Planner, Rank
from kvxfer.identity import Generation, Handle, Source, TransferId
from kvxfer.memory import Side
from kvxfer.protocol.messages import Message
from kvxfer.protocol.peer import NOBODY, PeerIdentity
from kvxfer.transport import Verb
from kvxfer.values import Stages

LinkId = bytes | tuple[str, int]
"""A link as either side names it. The consumer uses the producer rank's address, and a number for its epoch and all else that its
directory says of it. Both stay the same when the link is dialled again. The producer uses the name of the consumer's connection, which
is new each time."""


Role = Literal["producer", "consumer"]
Mode = Literal["read", "write", "sendrecv"]
"""How parts move over a link."""


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The outcome of a transfer on this side, which comes once. Its memory may still be in use: see ``Released``.

    What was delivered to the ranks of one engine belongs together only if all of it has the same generation.

    Attributes:
        role: Whether this side is the producer or the consumer.
        transfer: The transfer.
        handle: The engine's name for it: ``Fetch.handle`` or ``Offer.handle``; if empty, the transfer's name.
        outcome: How it ended.
        nbytes: The bytes that arrived; on a producer, those that its consumers have confirmed.
        seconds: Seconds since the call that began the transfer.
        generation: On a producer, the last one that was offered or revoked. On a consumer, the newest that was announced,
            which everything that was delivered has; ``None`` if none was announced, or nothing had to be moved.
        waited: On a consumer, how many of the ``seconds`` passed while no announced part was on its way; the rest was spent on
            moving and checking. 0 if no part was announced.
        payload: On a consumer, if it was delivered, the payload of the offer. If this rank reads from several producer ranks, that
            of the first that sent one; empty if it had nothing to read.
        stages: On a consumer, when it reached each stage.
        short: On a consumer, the token up to which it was delivered if the producer gave up before all were computed and
            those are enough (``Fetch.enough``); ``None`` if all were.
        unclaimed: On a producer, whether its lease has ended and no consumer had ever asked for it or said that it waits.
    """

    role: Role
    transfer: TransferId
    handle: Handle
    outcome: Outcome
    nbytes: int
    seconds: float
    generation: Generation | None = None
    waited: float = 0.0
    payload: bytes = b""
    stages: Stages = Stages()
    short: int | None = None
    unclaimed: bool = False


class Released(msgspec.Struct, frozen=True, gc=False):
    """Nothing reads or writes a transfer's blocks any more. It comes once, after ``Ended``."""

    role: Role
    transfer: TransferId
    handle: Handle
    generation: Generation | None = None  # on a producer, as in ``Ended``


class GenerationReleased(msgspec.Struct, frozen=True):
    """Nothing reads blocks any more that a producer has revoked while their transfer goes on.

    Each such call of ``Agent.revoke`` is followed by one of these, for its generation or a later one, or by the transfer's
    ``Released``, which says the same.

    Attributes:
        generation: Nothing reads blocks of this generation or of older ones any more.
    """

    role: Role
    transfer: TransferId
    handle: Handle
    generation: Generation


Event = Ended | Released | GenerationReleased


class Stats(msgspec.Struct, frozen=True):
    """Counts of an agent, as consumer and producer together.

    A part that only one side moves is counted on that side.

    Attributes:
        fetches: Fetches that are not released.
        offers: Offers that are leased, or of which something still moves.
        quarantined_bytes: Bytes of ended transfers whose memory the back end may still touch.
        corrupt: How often other bytes arrived than were sent.
        direct: Parts that it has begun to move without packing.
        staged: Parts that it has begun to move packed.
    """

    fetches: int
    offers: int
    quarantined_bytes: int
    corrupt: int
    direct: int
    staged: int


class PartRef(NamedTuple):
    """Names one part of one attempt, on the side that moves it."""

    role: Role
    link: LinkId
    transfer: TransferId
    attempt: int
    part: int


def in_order(refs: Iterable[PartRef]) -> list[PartRef]:
    """Return parts by their numbers, so that a machine's actions do not depend on the order of a set."""
    return sorted(refs, key=lambda ref: ref.part)


class LinkInfo(msgspec.Struct, frozen=True, dict=True):
    """What a machine knows of a link that is up."""

    mode: Mode  # how parts move over it
    planner: Planner  # plans copies between the two caches
    peer: int = 0  # the other agent's epoch
    piece_bytes: int = 0  # the size of a staged piece that both sides agreed on
    # a part goes staged if its rows are shorter than this many bytes on average; 0 means never
    stage_below: int = 0
    integrity: Integrity = "off"  # how much of what moves is hashed on both sides
    # on a consumer, returns the producer's revocation count; ``None`` if it cannot be read from here
    revocations: Callable[[], int] | None = None
    name: str = ""  # the peer's name for operators
    owner: PeerIdentity = NOBODY  # the peer that the link counts for, on a producer

    def moves_tail(self, wanted: bool) -> bool:
        """Return whether a fetch that says so (``Fetch.tail``) brings its last block to the end; the same on both sides.

        What lies there may be another request's, and only a consumer that reads could see it anyway.
        """
        return wanted and self.mode == "read"

    @cached_property
    def unattended(self) -> bool:
        """Whether the producer only has to send block tables, because all reads are direct and nothing is hashed."""
        direct = self.stage_below <= self.planner.least_row
        return self.mode == "read" and direct and self.integrity == "off"


# --- actions: what a machine asks the runtime to do ------------------------------------------------------------------


class Resolve(msgspec.Struct, frozen=True):
    """Find the route to this source; answer with ``ConsumerMachine.resolved``."""

    source: Source
    own: Source | None


@dataclass(frozen=True)
class RankRoute:
    """How to reach one producer rank that a fetch must contact."""

    link: LinkId
    readers: int  # how many consumer ranks read from it
    rank: Rank = Rank()


@dataclass(frozen=True)
class Resolved:
    """The producer ranks that a fetch must contact."""

    ranks: tuple[RankRoute, ...]


class Dial(msgspec.Struct, frozen=True):
    """Make this link; if it exists, close it first.

    Answer with ``link_up`` or ``link_down``; if one was closed, answer ``link_closed`` before that.
    """

    link: LinkId


class Close(msgspec.Struct, frozen=True):
    """Forget this link and its back-end connection.

    Answer the consumer with ``link_closed`` once nothing comes over it any more. A producer's ``Close`` makes the consumer dial
    again, and is answered with ``link_down``.
    """

    link: LinkId
    why: Failure


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message over a link."""

    link: LinkId
    message: Message


class Move(msgspec.Struct, frozen=True, gc=False):
    """Give a part to the data thread; answer with ``moved``."""

    ref: PartRef
    verb: Verb
    plan: CopyPlan
    stream: int  # the number of a two-sided part on its link
    piece_bytes: int
    check: CopyPlan | None = None  # what to hash of the part on this side once it has arrived; ``None`` for nothing


class Abort(msgspec.Struct, frozen=True):
    """End the moving or hashing of a part."""

    ref: PartRef


class RemoteWritesEnded(msgspec.Struct, frozen=True):
    """Record that the producer has ended its half of this part, and no longer writes into the memory lent to it."""

    ref: PartRef


class Hash(msgspec.Struct, frozen=True):
    """Make the checksum of what this plan moves, on its ``side``; answer with ``hashed``. An ``Abort`` may end it early."""

    ref: PartRef
    plan: CopyPlan
    side: Side  # whether the copies' source or their destination is read
    owner: PeerIdentity = NOBODY  # the peer that it counts for, on a producer


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Tell the engine of an event."""

    event: Event


Action = Resolve | Dial | Close | Send | Move | Abort | RemoteWritesEnded | Hash | Emit


class Moved(msgspec.Struct, frozen=True, gc=False):
    """The end of a part on this side, or that the data thread wants it aborted; if it was not quiet, this comes again once it is."""

    ref: PartRef
    failure: Failure | None  # why the part was not moved, or should be aborted; ``None`` if it was moved
    quiet: bool  # whether the back end no longer touches the part's memory here
    nbytes: int
    # whether it ended for no fault of its own, so that another attempt may follow: its link broke under something else,
    # or its consumer held a slot of staging memory for too long while others waited for one
    collateral: bool = False
    seconds: float = 0.0  # seconds since the data thread began with the part
    # the checksum of ``Move.check``, if it was made on the way; ``None`` if it is still to be made
    checksum: int | None = None


class HeldUp(enum.StrEnum):
    """What a part waits for that stands still, as a clause for operators."""

    CALL = "this engine's back end or device has not come back from a call"
    DEVICE = "this engine's device does not finish a piece of it"
    SLOT = "this engine has no slot of staging memory for it"
    PEER = "the producer has packed nothing more of it"


class Moving(msgspec.Struct, frozen=True):
    """How far parts have got that take long. Comes about once a second."""

    parts: tuple[tuple[PartRef, int], ...]  # the bytes of each that have come since it began, if they have become more
    # what parts wait for that stand still, if that is new; ``None``: they go on
    held_up: tuple[tuple[PartRef, HeldUp | None], ...] = ()


class Hashed(msgspec.Struct, frozen=True):
    """The checksum of a part's content on this side, or why there is none."""

    ref: PartRef
    value: int = 0
    failure: Failure | None = None


def link_name(link: LinkId) -> str:
    """Return the name of a link for operators."""
    return str(link[0]) if isinstance(link, tuple) else str(link)
