"""What travels besides the bytes: the messages of a link, over its TCP connection.

The talk is needed because NCCL tells little: not that a peer died, not that sizes differ, not that what was sent has
arrived. Each message is a length (four bytes, big endian) and MessagePack.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvxfer.backend.endpoint import Token
from kvxfer.errors import UNREADABLE
from kvxfer.failures import FailureKind
from kvxfer_nccl.endpoint import MAX_BYTES

Stream = Annotated[int, Meta(ge=0)]
Size = Annotated[int, Meta(ge=0)]


class Greeting(Struct, frozen=True, tag=0, array_like=True):
    """First on a connection, from both sides: the link meant, by the receiver's token and the sender's."""

    yours: Token
    mine: Token


class Ready(Struct, frozen=True, tag=1, array_like=True):
    """Receiver: I have something to receive and no communicator; make the ``n``-th."""

    n: int


class Id(Struct, frozen=True, tag=2, array_like=True):
    """Sender: open the ``n``-th communicator with this unique id, as I do now."""

    n: int
    unique_id: Annotated[bytes, Meta(max_length=256)]


class Sent(Struct, frozen=True, tag=3, array_like=True):
    """Sender: the next that I have enqueued is this stream, of this size."""

    stream: Stream
    nbytes: Size


class Received(Struct, frozen=True, tag=4, array_like=True):
    """Receiver: all streams up to this one lie in my memory."""

    stream: Stream


class Retire(Struct, frozen=True, tag=5, array_like=True):
    """Receiver: nothing moves any more; let us close the ``n``-th communicator, or not make it. I use it no more until you answer."""

    n: int


class Retired(Struct, frozen=True, tag=6, array_like=True):
    """Sender: it is closed, or will not be made."""

    n: int


class KeepOpen(Struct, frozen=True, tag=7, array_like=True):
    """Sender: no, I have just begun to send, or to make it."""

    n: int


class Bye(Struct, frozen=True, tag=8, array_like=True):
    """The link is over, and why; ``kind``: what that is for the batches on it."""

    reason: Annotated[str, Meta(max_length=500)]
    kind: FailureKind = FailureKind.PEER_LOST


class Opened(Struct, frozen=True, tag=9, array_like=True):
    """Receiver: the ``n``-th communicator is open on my side, and so has reached you, too."""

    n: int


Message = Greeting | Ready | Id | Opened | Sent | Received | Retire | Retired | KeepOpen | Bye

_decoder = msgspec.msgpack.Decoder(Message)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Return a message as it travels."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4) + body


def decode(raw: bytearray) -> Message | None:
    """Take the first message out of what has arrived, if all of it has.

    Raises:
        ValueError: It is none.
    """
    if len(raw) < 4:
        return None
    size = int.from_bytes(raw[:4])
    if size > MAX_BYTES:
        raise ValueError(f"a message of {size} bytes")
    if len(raw) < 4 + size:
        return None
    body = bytes(raw[4 : 4 + size])
    del raw[: 4 + size]
    try:
        message: Message = _decoder.decode(body)
    except UNREADABLE as e:
        raise ValueError(str(e)) from None
    return message
