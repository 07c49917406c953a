"""The messages of a transfer, all over one link, from the fetch request to the last message of either side.

``attempt`` numbers a consumer's successive attempts at one transfer, so that a late answer to an earlier attempt is never taken
for an answer to the present one.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvxfer.failures import FailureKind
from kvxfer.identity import FIRST, TransferId
from kvxfer.protocol.messages.bounds import (
    NO_CHECKSUM,
    Band,
    Checksum,
    Count,
    Digest,
    Number,
    OfferGeneration,
    Part,
    Readers,
    Seconds,
    WireMessage,
    shorten,
)
from kvxfer.values import MAX_PAYLOAD, BlockTable


class FetchRequest(WireMessage, frozen=True, tag="fetch"):
    """Consumer: bring the tokens ``[start, tokens)`` into these blocks."""

    transfer: TransferId
    attempt: Number
    digest: Digest
    start: Count
    tokens: Count
    blocks: BlockTable
    readers: Readers  # how many consumer ranks read from the producer rank
    seconds: Seconds  # how long the consumer will wait for the first part; after that, nothing has to be served
    # older generations are of no use, because another rank of the producer already has this one
    least: OfferGeneration = FIRST
    # how long it will wait for the rest, from the first part on; 0: all of it must come within ``seconds``
    moving: Seconds = 0.0
    offered: bool = False  # see ``Fetch``
    enough: Count = 0  # see ``Fetch``
    # whether parts of single bands of layers are wanted, because the link is slow; else each part holds all layers
    banded: bool = False
    tail: bool = False  # see ``Fetch``


class PartReady(WireMessage, frozen=True, tag="part"):
    """Producer: part ``part`` holds the tokens ``[lo, hi)``, of all layers or of some bands of them.

    What it means for the bytes depends on the mode of the link. Read: the consumer may read them. Send: they come in batches
    numbered from ``stream``. Write: they are in the consumer's memory or, if staged, will be written into the slots that it
    lends.
    """

    transfer: TransferId
    attempt: Number
    generation: OfferGeneration
    part: Part
    lo: Count
    hi: Count
    # whether this is the last part, which also holds the window and state groups. It ends before the last wanted token
    # only if the producer has given up, and the tokens before its end are enough
    final: bool
    # the blocks of each row that hold ``[lo, hi)``, so that all parts together have each block once. Whole rows if
    # window or state groups come with the part
    blocks: BlockTable
    stream: Count
    piece_bytes: Count  # the size of the pieces in which the part comes packed; 0 for direct runs
    # the revocation count when the attempt's first part was announced; ``None`` if the consumer has to ask
    revocations: Number | None = None
    payload: Annotated[bytes, Meta(max_length=MAX_PAYLOAD)] = b""  # the payload of the offer, with the final part
    # the first band of layers that the part holds, and the one after the last (``kvxfer.geometry.bands``); ``None`` for
    # all layers. Window and state groups belong to no band
    bands: tuple[Band, Band] | None = None


class SlotReady(WireMessage, frozen=True, tag="slot_ready"):
    """Either side: there is a slot for piece ``piece`` of a staged part.

    From the producer: the piece lies packed at ``offset`` of its staging memory, to be read; or is on its way, if it is sent;
    or is in the slot that was lent for it, if it is written. From the consumer, for a piece to be written: it may go to
    ``offset`` of the consumer's staging memory.
    """

    transfer: TransferId
    attempt: Number
    part: Part
    piece: Count
    offset: Count | None  # in bytes; ``None`` if the receiver need not know it
    nbytes: Count


class SlotFree(WireMessage, frozen=True, tag="slot_free"):
    """Consumer, staged read: the slot of this piece is free again."""

    transfer: TransferId
    attempt: Number
    part: Part
    piece: Count


class Underway(WireMessage, frozen=True, tag="underway"):
    """Producer: this much of an attempt has been written so far. It is sent while parts take long, about once a second.

    It changes no state. A consumer into whose memory others write sees no bytes until a part is complete.
    """

    transfer: TransferId
    attempt: Number
    moved: Number  # the bytes that have gone, as far as the back end tells
    nbytes: Number  # the bytes of all parts that were begun


class Checksums(WireMessage, frozen=True, tag="checksums"):
    """Producer: the checksum of all parts of this attempt on this side.

    A consumer that can read the revocation counter then need not ask.
    """

    transfer: TransferId
    attempt: Number
    checksum: Checksum


class CommitRequest(WireMessage, frozen=True, tag="commit"):
    """Consumer: all bytes have arrived, from you and from all others. Are they yours, and did this generation hold until now?"""

    transfer: TransferId
    attempt: Number
    generation: OfferGeneration
    # the checksum of the bytes from this producer rank, summed over all parts; 0 if the link checks nothing
    checksum: Checksum = NO_CHECKSUM
    round: Number = 0  # distinguishes the answer from that to an earlier request
    alone: bool = True  # whether nobody else is asked, so that a yes settles the transfer; otherwise ``Committed`` does


class CommitAck(WireMessage, frozen=True, tag="ack"):
    """Producer: yes to both questions of ``CommitRequest``, so that the consumer may trust these bytes.

    The answer no is ``AttemptClosed``.
    """

    transfer: TransferId
    attempt: Number
    # the round of the request; ``None`` answers a ``FetchRequest`` that came after its ``Committed``
    round: Number | None = 0


class Committed(WireMessage, frozen=True, tag="committed"):
    """Consumer: everything has arrived from all ranks and is trusted; I need nothing more of this transfer."""

    transfer: TransferId
    attempt: Number
    digest: Digest
    readers: Readers = 1  # as in ``FetchRequest``


class CloseAttempt(WireMessage, frozen=True, tag="close"):
    """Consumer: this attempt is over for me; stop moving bytes for it and answer ``AttemptClosed``."""

    transfer: TransferId
    attempt: Number
    digest: Digest
    kind: FailureKind
    reason: str
    again: bool = False  # whether the consumer still wants the transfer, and its next attempt follows
    readers: Readers = 1  # as in ``FetchRequest``

    def __post_init__(self) -> None:
        shorten(self)


class AttemptClosed(WireMessage, frozen=True, tag="closed"):
    """Producer: nothing more will come for this attempt, and nothing of mine touches your memory any more."""

    transfer: TransferId
    attempt: Number
    kind: FailureKind
    reason: str
    # whether a later generation may come, so that the consumer should make a new attempt instead of failing
    again: bool

    def __post_init__(self) -> None:
        shorten(self)
