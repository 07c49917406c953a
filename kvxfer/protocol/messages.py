"""What agents and directories say to each other: msgspec types, versioned, size-limited, never pickle.

One message is one ZeroMQ frame of msgpack. Between two agents every message belongs to a *link*, which a consumer
dials to one producer rank. ``attempt`` tells a consumer's successive tries at one transfer apart, so that a late
answer to an earlier try is never taken for one to the present.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.config import Integrity
from kvxfer.errors import PeerError
from kvxfer.facts import Facts
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Rank, ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.values import BlockTable

__all__ = [
    "MAX_BYTES",
    "PROTOCOL",
    "EngineDescriptor",
    "CommitRequest",
    "Committed",
    "CloseAttempt",
    "AttemptClosed",
    "PartReady",
    "Hello",
    "Lookup",
    "RankDescriptor",
    "Message",
    "Named",
    "Ping",
    "Pong",
    "Refused",
    "Renew",
    "Decline",
    "SlotReady",
    "Checksums",
    "SlotFree",
    "CommitAck",
    "FetchRequest",
    "Welcome",
    "decode",
    "encode",
    "failure",
    "pack_checksum",
]

PROTOCOL = 3
MAX_BYTES = 16 << 20
MAX_WORDS = 2000
MAX_PARTS = 1 << 16
MAX_NAMES = 1000
"""Transfers in one notice."""
NO_CHECKSUM = bytes(8)

# What a peer says is checked against these bounds as it is decoded; nothing behind the decoder meets other numbers.
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Number = Annotated[int, Meta(ge=-1, le=(1 << 63) - 1)]
Part = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
Seconds = Annotated[float, Meta(ge=0, le=86400 * 30)]
Checksum = Annotated[bytes, Meta(min_length=8, max_length=8)]
Digest = Annotated[bytes, Meta(max_length=64)]


class _Base(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Common settings of all messages."""


# --- a link's beginning --------------------------------------------------------------------------------------------


class Hello(_Base, frozen=True, tag="hello"):
    """Consumer to producer rank: who I am, which of your cache I will read, my back end's endpoint and how I use it.
    ``facts``: what all of my KV depends on (``kvxfer.facts``)."""

    protocol: int
    backend: str
    expect_epoch: Number
    epoch: Number
    engine: str
    endpoint: bytes
    cache: Cache
    assignments: tuple[ShardAssignment, ...]
    mode: str
    piece_bytes: Count
    integrity: Integrity = "off"
    facts: Facts = {}


class Welcome(_Base, frozen=True, tag="welcome"):
    """The producer's half of the hello. ``piece_bytes``, ``integrity``: as agreed: the smaller size of a staged piece,
    the stricter check. ``tally``: where the producer's is, for consumers on its host."""

    epoch: Number
    endpoint: bytes
    piece_bytes: Count
    integrity: Integrity = "off"
    revocations: Annotated[str, Meta(max_length=100)] = ""


class Refused(_Base, frozen=True, tag="refused"):
    """Producer: there is no link (any more). ``again``: dialling anew may help; else what was on it has failed.
    ``backend``: it could not be made with this back end; another may do. The reason is logged on both sides."""

    kind: FailureKind
    reason: str
    again: bool
    backend: bool = False

    def __post_init__(self) -> None:
        _shorten(self)


# --- a transfer's life ---------------------------------------------------------------------------------------------


class FetchRequest(_Base, frozen=True, tag="want"):
    """Consumer: bring the tokens ``[start, tokens)`` into these blocks.

    ``readers``: how many consumer ranks read from the producer rank. ``seconds``: how long it will wait; after that
    nothing has to be served any more. ``least``: another rank of the producer has this generation already, so that an
    older one is of no use.
    """

    transfer: TransferId
    attempt: Number
    digest: Digest
    start: Count
    tokens: Count
    blocks: BlockTable
    readers: Count
    seconds: Seconds
    least: Number = -1


class PartReady(_Base, frozen=True, tag="have"):
    """Producer: part ``part`` holds the tokens ``[lo, hi)``; with ``final`` also the window and state groups.

    What it means for the bytes depends on the link's verb. Read: take them. Send: they come on ``stream`` onwards.
    Write: they are in your memory, or, staged, will be written where you lend slots. ``piece_bytes`` is 0 for direct runs,
    else the part comes packed in pieces. ``tally``: what it was when the attempt's first part was announced;
    -1: ask.
    """

    transfer: TransferId
    attempt: Number
    generation: Number
    part: Part
    lo: Count
    hi: Count
    final: bool
    blocks: BlockTable
    stream: Count
    piece_bytes: Count
    revocations: Number = -1


class SlotReady(_Base, frozen=True, tag="slot"):
    """Word of piece ``piece`` of a staged part.

    Producer: it lies packed at ``offset`` of the producer's staging memory, to be read; or, where it is sent, is on its
    way; or, where it is written, is in the slot that was lent for it. Consumer, where it is written: a slot for it, at
    ``offset`` of the consumer's staging memory.
    """

    transfer: TransferId
    attempt: Number
    part: Part
    piece: Count
    offset: Count
    nbytes: Count


class SlotFree(_Base, frozen=True, tag="taken"):
    """Consumer, staged read: the slot of this piece is free again."""

    transfer: TransferId
    attempt: Number
    part: Part
    piece: Count


class Checksums(_Base, frozen=True, tag="sum"):
    """Producer: the checksum of all parts of this attempt as they lie here, for a consumer that sees the tally and then need
    not ask."""

    transfer: TransferId
    attempt: Number
    checksum: Checksum


class CommitRequest(_Base, frozen=True, tag="check"):
    """Consumer: all bytes have arrived, from you and from all others, and this is the checksum of yours (the sum over all
    parts; 0 where the link checks nothing). Are they yours, and did this generation hold until now?

    ``round``: tells the answer to this question from that to an earlier one. ``alone``: nobody else is asked, so that a yes
    settles it; else ``Committed`` does.
    """

    transfer: TransferId
    attempt: Number
    generation: Number
    checksum: Checksum = NO_CHECKSUM
    round: Number = 0
    alone: bool = True


class CommitAck(_Base, frozen=True, tag="verdict"):
    """Producer: yes to both, as of question ``round``. The consumer may trust these bytes. (If not, ``AttemptClosed``.)"""

    transfer: TransferId
    attempt: Number
    round: Number = 0


class Committed(_Base, frozen=True, tag="done"):
    """Consumer: all is here and trusted, from you and from all others: I need nothing more of this transfer."""

    transfer: TransferId
    attempt: Number
    digest: Digest


class CloseAttempt(_Base, frozen=True, tag="drop"):
    """Consumer: this attempt is over for me; stop moving bytes for it and answer ``AttemptClosed``. ``again``: I want the transfer
    still, and the next attempt follows."""

    transfer: TransferId
    attempt: Number
    digest: Digest
    kind: FailureKind
    reason: str
    again: bool = False

    def __post_init__(self) -> None:
        _shorten(self)


class AttemptClosed(_Base, frozen=True, tag="gone"):
    """Producer: nothing more will come for this attempt, and nothing of mine touches your memory any more.

    ``again``: a later generation may come; wait with a new attempt rather than fail.
    """

    transfer: TransferId
    attempt: Number
    kind: FailureKind
    reason: str
    again: bool

    def __post_init__(self) -> None:
        _shorten(self)


class Ping(_Base, frozen=True, tag="ping"):
    """Consumer: are you alive? Asked on every link, busy or not."""

    number: Number


class Pong(_Base, frozen=True, tag="pong"):
    number: Number


# --- the engine's directory ----------------------------------------------------------------------------------------


class Lookup(_Base, frozen=True, tag="lookup"):
    """Anyone to a directory: your card, please."""

    protocol: int


class RankDescriptor(_Base, frozen=True):
    """One worker of an engine: where its agent listens, the agent's epoch, its cache, and the back ends with which links to
    it may be made."""

    address: str
    epoch: Number
    cache: Cache
    backends: tuple[str, ...]


class EngineDescriptor(_Base, frozen=True, tag="card"):
    """A directory's answer: the engine's epoch, all its ranks, and what all of its KV depends on."""

    protocol: int
    engine: str
    epoch: Number
    members: tuple[RankDescriptor, ...]
    facts: Facts = {}

    def member(self, rank: Rank) -> RankDescriptor:
        return next(m for m in self.members if m.cache.rank == rank)


class Named(_Base, frozen=True):
    """A transfer as only those know it who know its prompt: a name can be guessed, a digest cannot."""

    transfer: TransferId
    digest: Digest


Names = Annotated[tuple[Named, ...], Meta(max_length=MAX_NAMES)]


class Renew(_Base, frozen=True, tag="renew"):
    """A consumer's scheduler half to the producer's: these transfers are still wanted, keep their leases."""

    epoch: Number
    transfers: Names


class Decline(_Base, frozen=True, tag="decline"):
    """A consumer's scheduler half to the producer's: these will never be fetched, free them."""

    epoch: Number
    transfers: Names
    reason: str

    def __post_init__(self) -> None:
        _shorten(self)


Message = (
    Hello
    | Welcome
    | Refused
    | FetchRequest
    | PartReady
    | SlotReady
    | SlotFree
    | Checksums
    | CommitRequest
    | CommitAck
    | Committed
    | CloseAttempt
    | AttemptClosed
    | Ping
    | Pong
    | Lookup
    | EngineDescriptor
    | Renew
    | Decline
)


def failure(message: Refused | CloseAttempt | AttemptClosed, peer: str, before: str = "") -> Failure:
    """Return what a peer has said of a failure as ours; ``before``: what we say of that."""
    return Failure(message.kind, before + message.reason, peer)


def _shorten(message: Refused | CloseAttempt | AttemptClosed | Decline) -> None:
    """Words for people are cut where they get too long to be read."""
    if len(message.reason) > MAX_WORDS:
        msgspec.structs.force_setattr(message, "reason", message.reason[:MAX_WORDS] + " [...]")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame. Raises ``PeerError`` when it would exceed ``MAX_BYTES``."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_BYTES:
        too_long = f"a {type(message).__name__} of {len(frame)} bytes exceeds the limit of {MAX_BYTES}"
        raise PeerError(too_long, kind=FailureKind.MISUSE)
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame from a peer. Raises ``PeerError`` for whatever is not one."""
    if len(frame) > MAX_BYTES:
        too_long = f"a frame of {len(frame)} bytes exceeds the limit of {MAX_BYTES}"
        raise PeerError(too_long, kind=FailureKind.MISUSE)
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as e:
        raise PeerError(f"not a kvxfer message: {e}", kind=FailureKind.MISUSE) from None


def pack_checksum(value: int) -> bytes:
    """A checksum for the wire: modulo 2**64, little-endian."""
    return (value % (1 << 64)).to_bytes(8, "little")
