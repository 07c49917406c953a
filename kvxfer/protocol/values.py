"""What goes into and comes out of the protocol's state machines: values only, no sockets, no threads, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import msgspec

from kvxfer.config import Integrity
from kvxfer.failures import DELIVERED, Failure, Outcome
from kvxfer.geometry import CopyPlan, Planner, Rank
from kvxfer.identity import Generation, Source, TransferId
from kvxfer.memory import Side
from kvxfer.protocol.messages import Message
from kvxfer.transport import Verb

__all__ = [
    "DELIVERED",
    "Abort",
    "RemoteWritesEnded",
    "Action",
    "Close",
    "Dial",
    "Ended",
    "Event",
    "Failure",
    "Hash",
    "Hashed",
    "RankRoute",
    "LinkId",
    "LinkInfo",
    "Mode",
    "Move",
    "Moved",
    "Outcome",
    "PartRef",
    "Progress",
    "Released",
    "Emit",
    "Resolve",
    "Resolved",
    "Role",
    "Send",
    "Stages",
    "Stats",
    "in_order",
    "link_name",
]

LinkId = bytes | tuple[str, int]
"""A link as its owner names it: the consumer by the producer rank's (address, epoch), the same again after it was dialled anew;
the producer by the name of the consumer's connection, which is another one each time."""


Role = Literal["producer", "consumer"]
Mode = Literal["read", "write", "sendrecv"]
"""How parts move over a link."""


class Stages(msgspec.Struct, frozen=True, gc=False):
    """When a fetch reached its stages on one rank: by ``time.monotonic``, which all processes of a host share; 0: it did not.

    Attributes:
        began: the engine asked for it.
        asked: the last of the producer ranks was asked, over a link that was up.
        announced: the first of them had said where the first bytes are.
        heard: they had said so of the last bytes.
        arrived: the last bytes were here.
        ended: it had its outcome.
        moving: no time of day, but the seconds in which parts that had been announced were on their way or being checked. What a
            producer sends as it computes, or in parts one after the other, has waits in between that do not count.
    """

    began: float = 0.0
    asked: float = 0.0
    announced: float = 0.0
    heard: float = 0.0
    arrived: float = 0.0
    ended: float = 0.0
    moving: float = 0.0

    @property
    def unasked(self) -> bool:
        """Whether it began, and no producer rank was ever asked: none can count us as its reader."""
        return bool(self.began) and not self.asked

    def slowest(self, other: Stages) -> Stages:
        """Return the later time of each stage, of two ranks, and the longer time on the way."""
        return Stages(*(max(getattr(self, stage), getattr(other, stage)) for stage in self.__struct_fields__))


class Ended(msgspec.Struct, frozen=True, gc=False):
    """The one outcome of a transfer on this side. Its memory may still be in use: see ``Released``.

    What the ranks of one engine were delivered belongs together only if it is of one generation.

    Attributes:
        handle: what the engine calls it: ``Fetch.handle``, or ``Offer.handle``, or the transfer's name where there is none.
        nbytes: the bytes that have come; on a producer, those that its consumers have confirmed.
        seconds: from the call that began the transfer.
        generation: on a producer, the last one that was offered or revoked. On a consumer, the newest that it has heard of,
            which is that of all that was delivered; ``None`` if it has heard of none, or nothing had to come.
        waited: on a consumer, how many of the ``seconds`` passed while nothing that it had heard of was on its way, so that the rest
            was spent on moving and checking; 0 if it heard of no part.
        payload: on a consumer to which it was delivered, what came with the offer; of the first producer rank that has given
            something along, where this rank reads from several, and empty where it had nothing to read.
        stages: on a consumer, when it came how far.
        short: on a consumer to which it was delivered, the token up to which it is here, where the producer has given up before
            all were computed and so many are enough (``Fetch.enough``); ``None`` where all are.
    """

    role: Role
    transfer: TransferId
    handle: str
    outcome: Outcome
    nbytes: int
    seconds: float
    generation: Generation | None = None
    waited: float = 0.0
    payload: bytes = b""
    stages: Stages = Stages()
    short: int | None = None


class Released(msgspec.Struct, frozen=True, gc=False):
    """The end of all use of a transfer's blocks: nothing reads or writes them any more. It comes once, after ``Ended``."""

    role: Role
    transfer: TransferId
    handle: str
    generation: Generation | None = None  # producer: as in ``Ended``


class GenerationReleased(msgspec.Struct, frozen=True):
    """The end of all use of blocks that a producer has revoked while their transfer goes on.

    Each such call of ``Agent.revoke`` is followed by one, for its generation or a later one; or by the transfer's ``Released``,
    which says the same.

    Attributes:
        generation: nothing reads blocks of this one or of older ones any more.
    """

    role: Role
    transfer: TransferId
    handle: str
    generation: Generation


class Progress(msgspec.Struct, frozen=True):
    """Some more tokens of a fetch have come; see ``Fetch.progress``.

    What has come may still turn out to be of no use: only an ``Ended`` that says delivered makes it so.

    Attributes:
        tokens: tokens ``[start, tokens)`` are here, from all producer ranks, in all groups of kind ``full``. Others come
            whole at the end.
    """

    role: Role
    transfer: TransferId
    handle: str
    tokens: int


Event = Ended | Released | GenerationReleased | Progress


class Stats(msgspec.Struct, frozen=True):
    """What an agent has in hand, and what it has counted as consumer or producer.

    A part that one side moves alone is counted on that side.

    Attributes:
        fetches: those that it has in hand.
        offers: those that are leased, or of which something still moves.
        quarantined_bytes: bytes of ended transfers whose memory the back end may still touch.
        corrupt: how often other bytes had arrived than were sent.
        direct: parts that it has begun to move with their runs as they are.
        staged: parts that it has begun to move packed.
    """

    fetches: int
    offers: int
    quarantined_bytes: int
    corrupt: int
    direct: int
    staged: int


class PartRef(NamedTuple):
    """The name of one part of one attempt, on the side that moves it."""

    role: Role
    link: LinkId
    transfer: TransferId
    attempt: int
    part: int


def in_order(refs: Iterable[PartRef]) -> list[PartRef]:
    """Return parts by their numbers, so that what a machine asks for does not depend on how a set is laid out."""
    return sorted(refs, key=lambda ref: ref.part)


class LinkInfo(msgspec.Struct, frozen=True, dict=True):
    """What a machine knows of a link that is up.

    Attributes:
        peer: the other agent's epoch.
        piece_bytes: size of a staged piece that both sides agreed on.
        stage_below: a part whose pattern rows are shorter than so many bytes on average goes staged; 0 means never.
        integrity: how much of what moves is hashed on both sides.
        revocations: on a consumer, returns the producer's revocation counter; ``None`` where it cannot be seen from here.
        name: what operators know the peer by.
    """

    mode: Mode
    planner: Planner
    peer: int = 0
    piece_bytes: int = 0
    stage_below: int = 0
    integrity: Integrity = "off"
    revocations: Callable[[], int] | None = None
    name: str = ""

    @cached_property
    def unattended(self) -> bool:
        """Whether a consumer needs only block tables of the producer: it reads direct, whatever that is, and nothing is hashed."""
        direct = self.stage_below <= self.planner.least_row
        return self.mode == "read" and direct and self.integrity == "off"


# --- actions: what a machine asks its shell to do ------------------------------------------------------------------


class Resolve(msgspec.Struct, frozen=True):
    """Find the route to this source; answer with ``ConsumerMachine.resolved``.

    Attributes:
        own: see ``Fetch``.
    """

    source: Source
    own: Source | None


@dataclass(frozen=True)
class RankRoute:
    """How one producer rank is reached that a fetch must contact.

    Attributes:
        link: the link to that rank.
        readers: how many consumer ranks read from it.
    """

    link: LinkId
    readers: int
    rank: Rank = Rank()


@dataclass(frozen=True)
class Resolved:
    """The producer ranks that a fetch must contact."""

    ranks: tuple[RankRoute, ...]


class Dial(msgspec.Struct, frozen=True):
    """Make this link; if there is one, close that first.

    Answer with ``link_up`` or ``link_down``, and for one that was closed with ``link_closed`` before that.
    """

    link: LinkId


class Close(msgspec.Struct, frozen=True):
    """Forget this link and its back-end connection.

    Answer the consumer with ``link_closed`` once nothing comes over it any more. A producer's ``Close`` has the consumer dial
    anew, and is answered with ``link_down``.
    """

    link: LinkId
    why: Failure


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send a message over a link."""

    link: LinkId
    message: Message


class Move(msgspec.Struct, frozen=True, gc=False):
    """Give a part to the data thread; answer with ``moved``.

    Attributes:
        stream: the number of a two-sided part among those of its link.
        check: what is to be hashed of the part on this side once it has arrived; ``None`` for nothing.
    """

    ref: PartRef
    verb: Verb
    plan: CopyPlan
    stream: int
    piece_bytes: int
    check: CopyPlan | None = None


class Abort(msgspec.Struct, frozen=True):
    """End the move or the hashing of a part."""

    ref: PartRef


class RemoteWritesEnded(msgspec.Struct, frozen=True):
    """Note that the producer has ended its half of this part: it writes nothing more into the memory that was lent to it."""

    ref: PartRef


class Hash(msgspec.Struct, frozen=True):
    """Checksum what this plan moves, on our side of it; answer with ``hashed``. An ``Abort`` may end it early."""

    ref: PartRef
    plan: CopyPlan
    side: Side


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Tell the engine of an event."""

    event: Event


Action = Resolve | Dial | Close | Send | Move | Abort | RemoteWritesEnded | Hash | Emit


class Moved(msgspec.Struct, frozen=True, gc=False):
    """The end of a part on this side; comes again, quiet, when it was not quiet the first time.

    Attributes:
        failure: why the part was not moved; ``None`` if it was.
        quiet: the back end no longer touches the part's memory here.
        collateral: the part ended only because its link broke under something else.
        seconds: from when the data thread took the part up.
        checksum: that of what ``Move.check`` names, if memory was read on the way; ``None`` means that it has to be hashed still.
    """

    ref: PartRef
    failure: Failure | None
    quiet: bool
    nbytes: int
    collateral: bool = False
    seconds: float = 0.0
    checksum: int | None = None


class Hashed(msgspec.Struct, frozen=True):
    """The checksum of a part's content on this side, or why there is none."""

    ref: PartRef
    value: int = 0
    failure: Failure | None = None


def link_name(link: LinkId) -> str:
    """Return a link as an operator would look for it."""
    return str(link[0]) if isinstance(link, tuple) else str(link)
