"""What agents and directories say to each other: msgspec types, versioned, size-limited, never pickle.

One message is one frame of msgpack. Between two agents every message belongs to a *link*, which a consumer
dials to one producer rank. ``attempt`` tells a consumer's successive tries at one transfer apart, so that a late
answer to an earlier try is never taken for an answer to the present one.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer import arguments
from kvxfer.config import Integrity
from kvxfer.errors import PeerError
from kvxfer.facts import Facts
from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import Cache, Rank, ShardAssignment
from kvxfer.identity import TransferId
from kvxfer.values import MOST_DIGEST, MOST_PAYLOAD, BlockTable

__all__ = [
    "MAX_BYTES",
    "PROTOCOL",
    "EngineDescriptor",
    "CommitRequest",
    "Committed",
    "CloseAttempt",
    "AttemptClosed",
    "Await",
    "Begun",
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
    "ToConsumer",
    "ToProducer",
    "CommitAck",
    "FetchRequest",
    "Welcome",
    "decode",
    "encode",
    "failure",
    "pack_checksum",
]

PROTOCOL = 6
MAX_BYTES = 16 << 20
MAX_WORDS = 2000
MAX_PARTS = 1 << 16
MAX_NAMES = 1000
"""Transfers in one notice."""
NO_CHECKSUM = bytes(8)

# What a peer says is checked against these bounds as it is decoded; nothing behind the decoder meets other numbers.
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Part = Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
Seconds = Annotated[float, Meta(ge=0, le=86400 * 30)]
Checksum = Annotated[bytes, Meta(min_length=8, max_length=8)]
Digest = Annotated[bytes, Meta(max_length=MOST_DIGEST)]


class _Base(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Common settings of all messages."""


# --- a link's beginning --------------------------------------------------------------------------------------------


class Hello(_Base, frozen=True, tag="hello"):
    """Consumer to producer rank: who I am, and how I will read your cache.

    Attributes:
        endpoint: That of the consumer's back end.
        assignments: Which of the producer rank's cache the consumer will read.
        mode: How the consumer uses the back end.
        piece_bytes: Size of its staged pieces.
        facts: What all KV of the consumer depends on (``kvxfer.facts``).
        stage_below: Parts whose rows are shorter on average, in bytes, must come staged.
    """

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
    stage_below: Count = 0


class Welcome(_Base, frozen=True, tag="welcome"):
    """Producer: the answer to ``Hello``, by which the link is made.

    Attributes:
        piece_bytes: Size of a staged piece, as agreed: the smaller one of both sides.
        integrity: What is checked, as agreed: the stricter setting of both sides.
        revocations: Where consumers on the producer's host find its revocation counter.
    """

    epoch: Number
    endpoint: bytes
    piece_bytes: Count
    integrity: Integrity = "off"
    revocations: Annotated[str, Meta(max_length=100)] = ""


class Refused(_Base, frozen=True, tag="refused"):
    """Producer: there is no link, or none any more. The reason is logged on both sides.

    Attributes:
        again: Dialling anew may help; otherwise, what was on the link has failed.
        backend: The link could not be made with this back end; another may do.
    """

    kind: FailureKind
    reason: str
    again: bool
    backend: bool = False

    def __post_init__(self) -> None:
        _shorten(self)


# --- a transfer's life ---------------------------------------------------------------------------------------------


class FetchRequest(_Base, frozen=True, tag="fetch"):
    """Consumer: bring the tokens ``[start, tokens)`` into these blocks.

    Attributes:
        readers: How many consumer ranks read from the producer rank.
        seconds: How long the consumer will wait for the first part; after that nothing has to be served any more.
        least: Older generations are of no use, because another rank of the producer has this one already.
        moving: How long it will wait for the rest, from the first part on; 0: all of it must come within ``seconds``.
        offered: See ``Fetch``.
        enough: See ``Fetch``.
    """

    transfer: TransferId
    attempt: Number
    digest: Digest
    start: Count
    tokens: Count
    blocks: BlockTable
    readers: Count
    seconds: Seconds
    least: Number = 0
    moving: Seconds = 0.0
    offered: bool = False
    enough: Count = 0


class PartReady(_Base, frozen=True, tag="part"):
    """Producer: part ``part`` holds the tokens ``[lo, hi)``.

    What it means for the bytes depends on the link's verb. Read: the consumer may read them. Send: they come from ``stream``
    onwards. Write: they are in the consumer's memory or, if staged, will be written into the slots that it lends.

    Attributes:
        final: The part is the last one, and holds the window and state groups, too. It ends before the last token that is wanted
            only if the producer has given up, and so many tokens are enough.
        piece_bytes: Size of the pieces in which the part comes packed; 0 for direct runs.
        revocations: The revocation counter when the attempt's first part was announced; ``None`` means that the consumer has to ask.
        payload: What came with the offer, with the final part.
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
    revocations: Number | None = None
    payload: Annotated[bytes, Meta(max_length=MOST_PAYLOAD)] = b""


class SlotReady(_Base, frozen=True, tag="slot_ready"):
    """Either side: there is a slot for piece ``piece`` of a staged part.

    From the producer: the piece lies packed at ``offset`` of the producer's staging memory, to be read; or, where it is sent,
    is on its way; or, where it is written, is in the slot that was lent for it. From the consumer, where it is written: a
    slot for it is at ``offset`` of the consumer's staging memory.

    Attributes:
        offset: In bytes; ``None`` where the receiver need not know it.
    """

    transfer: TransferId
    attempt: Number
    part: Part
    piece: Count
    offset: Count | None
    nbytes: Count


class SlotFree(_Base, frozen=True, tag="slot_free"):
    """Consumer, staged read: the slot of this piece is free again."""

    transfer: TransferId
    attempt: Number
    part: Part
    piece: Count


class Checksums(_Base, frozen=True, tag="checksums"):
    """Producer: the checksum of all parts of this attempt as they lie here.

    It is for a consumer that sees the revocation counter, and then need not ask.
    """

    transfer: TransferId
    attempt: Number
    checksum: Checksum


class CommitRequest(_Base, frozen=True, tag="commit"):
    """Consumer: all bytes have arrived, from you and from all others. Are they yours, and did this generation hold until now?

    Attributes:
        checksum: That of the bytes from this producer rank, the sum over all parts; 0 where the link checks nothing.
        round: Tells the answer to this question from that to an earlier one.
        alone: Nobody else is asked, so that a yes settles it; otherwise ``Committed`` does.
    """

    transfer: TransferId
    attempt: Number
    generation: Number
    checksum: Checksum = NO_CHECKSUM
    round: Number = 0
    alone: bool = True


class CommitAck(_Base, frozen=True, tag="ack"):
    """Producer: yes to both questions of ``CommitRequest``, so that the consumer may trust these bytes.

    The answer no is ``AttemptClosed``.

    Attributes:
        round: That of the request that is answered; ``None`` answers a ``FetchRequest`` that has come after its ``Committed``.
    """

    transfer: TransferId
    attempt: Number
    round: Number | None = 0


class Committed(_Base, frozen=True, tag="committed"):
    """Consumer: all is here and trusted, from you and from all others: I need nothing more of this transfer.

    Attributes:
        readers: As in ``FetchRequest``.
    """

    transfer: TransferId
    attempt: Number
    digest: Digest
    readers: Count = 1


class CloseAttempt(_Base, frozen=True, tag="close"):
    """Consumer: this attempt is over for me; stop moving bytes for it and answer ``AttemptClosed``.

    Attributes:
        again: The consumer still wants the transfer, and its next attempt follows.
        readers: As in ``FetchRequest``.
    """

    transfer: TransferId
    attempt: Number
    digest: Digest
    kind: FailureKind
    reason: str
    again: bool = False
    readers: Count = 1

    def __post_init__(self) -> None:
        _shorten(self)


class AttemptClosed(_Base, frozen=True, tag="closed"):
    """Producer: nothing more will come for this attempt, and nothing of mine touches your memory any more.

    Attributes:
        again: A later generation may come; wait with a new attempt rather than fail.
    """

    transfer: TransferId
    attempt: Number
    kind: FailureKind
    reason: str
    again: bool

    def __post_init__(self) -> None:
        _shorten(self)


class Ping(_Base, frozen=True, tag="ping"):
    """Consumer: are you alive? This is asked on every link, busy or not."""

    number: Number


class Pong(_Base, frozen=True, tag="pong"):
    """Producer: yes, to the ``Ping`` of the same number."""

    number: Number


# --- the engine's directory ----------------------------------------------------------------------------------------


class Lookup(_Base, frozen=True, tag="lookup"):
    """Anyone to a directory: send me the descriptor of your engine."""

    protocol: int


class RankDescriptor(_Base, frozen=True):
    """What a directory tells of one rank of its engine.

    Attributes:
        address: Where the rank's agent listens.
        epoch: The agent's.
        cache: The layout of the rank's cache.
        backends: Those with which links to the rank may be made.
    """

    address: str
    epoch: Number
    cache: Cache
    backends: tuple[str, ...]


class EngineDescriptor(_Base, frozen=True, tag="engine"):
    """A directory's answer: the engine's epoch, all its ranks, and what all its KV depends on."""

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

    def __post_init__(self) -> None:
        arguments.instance("transfer", self.transfer, TransferId)
        arguments.octets("digest", self.digest, MOST_DIGEST, empty=True)


Names = Annotated[tuple[Named, ...], Meta(max_length=MAX_NAMES)]


class Renew(_Base, frozen=True, tag="renew"):
    """A consumer's scheduler side to the producer's: these transfers are still wanted, keep their leases."""

    epoch: Number
    transfers: Names


class Decline(_Base, frozen=True, tag="decline"):
    """A consumer's scheduler side to the producer's: these will never be fetched, free them."""

    epoch: Number
    transfers: Names
    reason: str

    def __post_init__(self) -> None:
        _shorten(self)


class Await(_Base, frozen=True, tag="await"):
    """A consumer's scheduler side to the producer's directory: say when you have begun with these."""

    epoch: Number
    transfers: Names


class Begun(_Base, frozen=True, tag="begun"):
    """The directory's answer to ``Await``, at once or later: the engine has begun with these, or they are over."""

    transfers: Names


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
    | Await
    | Begun
)

ToProducer = FetchRequest | CommitRequest | Committed | CloseAttempt
"""What a consumer rank's machine says to a producer rank's."""
ToConsumer = PartReady | Checksums | CommitAck | AttemptClosed
"""And the other way."""


def failure(message: Refused | CloseAttempt | AttemptClosed, peer: str, before: str = "") -> Failure:
    """Return what a peer has said of a failure as one of ours.

    Args:
        message: The peer's.
        peer: The peer's name for operators.
        before: Our words, to be put before the peer's.
    """
    return Failure(message.kind, before + message.reason, peer)


def _shorten(message: Refused | CloseAttempt | AttemptClosed | Decline) -> None:
    """Cut words for people where they get too long to be read."""
    if len(message.reason) > MAX_WORDS:
        msgspec.structs.force_setattr(message, "reason", message.reason[:MAX_WORDS] + " [...]")


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return a message as one frame.

    Raises:
        PeerError: The frame would exceed ``MAX_BYTES``.
    """
    frame = _encoder.encode(message)
    if len(frame) > MAX_BYTES:
        too_long = f"a {type(message).__name__} of {len(frame)} bytes exceeds the limit of {MAX_BYTES}"
        raise PeerError(too_long, kind=FailureKind.MISUSE)
    return frame


def decode(frame: bytes | memoryview) -> Message:
    """Return the message in a frame from a peer.

    Raises:
        PeerError: The frame is too long, or is not a message.
    """
    if len(frame) > MAX_BYTES:
        too_long = f"a frame of {len(frame)} bytes exceeds the limit of {MAX_BYTES}"
        raise PeerError(too_long, kind=FailureKind.MISUSE)
    try:
        return _decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeDecodeError) as e:
        raise PeerError(f"not a kvxfer message: {e}", kind=FailureKind.MISUSE) from None


def pack_checksum(value: int) -> bytes:
    """Return a checksum as the wire has it: modulo 2**64, little-endian."""
    return (value % (1 << 64)).to_bytes(8, "little")
