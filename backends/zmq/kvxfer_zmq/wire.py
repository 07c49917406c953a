"""What goes over ZeroMQ: how a dialer introduces itself, and messages.

Every link has two connections, one for each direction: each side dials the other's ROUTER socket with a DEALER of its
own, and everything it has to say goes that way. A dialer shows the listener's token as a password before ZeroMQ takes anything
else from it, for ZeroMQ bounds a frame but not the number of a message's frames. A routing id is the tokens of both ends, so
only the two that exchanged endpoints can speak on a link. A message is a header, followed by a payload for some kinds.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from kvxfer.backend.endpoint import TOKEN_BYTES

ROUTING_ID_BYTES = 2 * TOKEN_BYTES + 1
_HEADER = struct.Struct("<BQQQ")


class Kind(enum.IntEnum):
    """Kinds of messages.

    ``stream`` counts the SENDs of the side that sends them; ``a`` and ``b`` are by kind:

    HELLO, WELCOME: the sender's ``connect`` was called; HELLO asks for WELCOME.
    GRANT: the receiver has posted ``stream`` of ``b`` bytes and takes those below offset ``a``.
    DATA: the payload belongs at offset ``a`` of ``stream``.
    DONE: all bytes of ``stream`` are in the receiver's memory.
    CANCEL, REFUSE: the sending, the receiving half of ``stream`` ended early; the payload says why.
    BYE: the link is over; the payload says why.
    """

    HELLO = 1
    WELCOME = 2
    GRANT = 3
    DATA = 4
    DONE = 5
    CANCEL = 6
    REFUSE = 7
    BYE = 8


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """What a message begins with; ``Kind`` says what the numbers mean."""

    kind: Kind
    stream: int = 0
    a: int = 0
    b: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def decode(cls, raw: bytes) -> Header:
        """Read a header.

        Raises:
            ValueError: It is none.
        """
        try:
            kind, stream, a, b = _HEADER.unpack(raw)
        except struct.error as e:
            raise ValueError(f"not a header: {e}") from None
        if kind not in _KINDS:
            raise ValueError(f"unknown kind of message {kind}")
        return cls(_KINDS[kind], stream, a, b)


def routing_id(listener: bytes, dialer: bytes) -> bytes:
    """How a dialer introduces itself to a listener. ZeroMQ keeps ids that begin with a zero byte for itself."""
    return b"k" + listener + dialer


def password(listener: bytes) -> bytes:
    """Return what a dialer shows to a listener, as text."""
    return listener.hex().encode()


def split_routing_id(raw: bytes) -> tuple[bytes, bytes] | None:
    """Return (listener's token, dialer's token), or ``None`` for an id that is not ours."""
    if len(raw) != ROUTING_ID_BYTES or raw[:1] != b"k":
        return None
    return raw[1 : 1 + TOKEN_BYTES], raw[1 + TOKEN_BYTES :]
