"""The messages between agents and directories: msgspec types, versioned, of bounded size, never pickle.

One message is one frame of msgpack. Between two agents, every message belongs to a *link*, which a consumer
dials to one producer rank.
"""

from __future__ import annotations

import msgspec

from kvxfer.errors import UNREADABLE, PeerError
from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol.messages.bounds import MAX_BYTES, MAX_PARTS, MAX_RANKS, MAX_WORDS, PROTOCOL
from kvxfer.protocol.messages.directory import (
    Await,
    Begun,
    Decline,
    EngineDescriptor,
    Inquire,
    InquiryAnswer,
    Lookup,
    Named,
    OtherContent,
    RankDescriptor,
    Renew,
)
from kvxfer.protocol.messages.explain import MAX_STORIES, Explain, Explained, Prefixes, Story
from kvxfer.protocol.messages.link import Hello, Ping, Pong, Refused, Welcome
from kvxfer.protocol.messages.transfer import (
    AttemptClosed,
    Checksums,
    CloseAttempt,
    CommitAck,
    CommitRequest,
    Committed,
    FetchRequest,
    PartReady,
    SlotFree,
    SlotReady,
    Underway,
)

__all__ = [
    "MAX_BYTES",
    "MAX_PARTS",
    "MAX_RANKS",
    "MAX_STORIES",
    "MAX_WORDS",
    "PROTOCOL",
    "EngineDescriptor",
    "Explain",
    "Explained",
    "Prefixes",
    "Story",
    "CommitRequest",
    "Committed",
    "CloseAttempt",
    "AttemptClosed",
    "Await",
    "Begun",
    "PartReady",
    "Hello",
    "InquiryAnswer",
    "Inquire",
    "Lookup",
    "RankDescriptor",
    "Message",
    "Named",
    "OtherContent",
    "Ping",
    "Pong",
    "Refused",
    "Renew",
    "Decline",
    "SlotReady",
    "Checksums",
    "Underway",
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
    | Underway
    | Ping
    | Pong
    | Lookup
    | EngineDescriptor
    | Renew
    | Decline
    | Await
    | Begun
    | OtherContent
    | Explain
    | Explained
    | Inquire
    | InquiryAnswer
)

ToProducer = FetchRequest | CommitRequest | Committed | CloseAttempt
"""Messages from a consumer rank's machine to a producer rank's."""
ToConsumer = PartReady | Underway | Checksums | CommitAck | AttemptClosed
"""Messages from a producer rank's machine to a consumer rank's."""


def failure(message: Refused | CloseAttempt | AttemptClosed, peer: str, before: str = "") -> Failure:
    """Return the failure that a peer's message tells of, with the words ``before`` in front of the peer's reason.

    ``peer``: its name for operators.
    """
    return Failure(message.kind, before + message.reason, peer)


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
    except UNREADABLE as e:
        raise PeerError(f"not a kvxfer message: {e}", kind=FailureKind.MISUSE) from None


def pack_checksum(value: int) -> bytes:
    """Return a checksum as messages have it: modulo 2**64, little-endian."""
    return (value % (1 << 64)).to_bytes(8, "little")
