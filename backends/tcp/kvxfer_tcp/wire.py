"""What goes over TCP: greetings and frames.

The side that reads dials; the side whose memory is read listens. A link has several connections in each direction in which
it reads. Each begins with a greeting: the dialler shows the listener's token, and the listener answers with the
dialler's, so that each knows that the other holds both endpoints of this link.

After that the dialler asks on its first connection, and the listener answers on all of them. A frame is a header, and what
its kind says. The bytes of a request are one stream, run after run, that both sides cut at the same places into *chunks*;
each chunk goes as one frame over whichever connection has room.

Where both sides encrypt, all but the dialler's greeting and HELLO goes in records (``kvxfer_tcp.encryption``).
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

MAGIC = b"kvxfer\x00\x02"

_GREETING = struct.Struct("<8s16s")
GREETING_BYTES = _GREETING.size

_HEADER = struct.Struct("<IIIIQ")
FRAME_BYTES = _HEADER.size

MAX_REASON = 400
"""Bytes of the text in a REFUSED."""


class Violation(ValueError):
    """The peer said what no peer of ours would."""


class Kind(enum.IntEnum):
    """The meaning of a frame. ``request``: a number that the dialler gives, 0, 1, 2 ... on each link.

    HELLO: the first frame of each connection, which is the dialler's number ``chunk`` of the link: it asks on number 0.
    ASK: read ``size`` runs of ``memory``, in chunks of ``chunk`` bytes; as many flat offsets and then lengths follow, int64.
    CANCEL: what is left of the request is of no more use.
    DATA: chunk number ``chunk`` of the request, of ``size`` bytes, follows.
    REFUSED: the request has failed; ``size`` bytes of text say why.
    """

    HELLO = 1
    ASK = 2
    CANCEL = 3
    DATA = 4
    REFUSED = 5


_KINDS = {int(kind): kind for kind in Kind}


class Header(NamedTuple):
    """The beginning of a frame."""

    kind: Kind
    size: int = 0
    memory: int = 0
    chunk: int = 0
    request: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(*self)

    @classmethod
    def decode(cls, raw: bytes | bytearray) -> Header:
        """Return the header that these bytes are.

        Raises:
            Violation: They are none.
        """
        kind, *rest = _HEADER.unpack(raw)
        if kind not in _KINDS:
            raise Violation(f"a frame of unknown kind {kind}")
        return cls(_KINDS[kind], *rest)


def greeting(token: bytes) -> bytes:
    """Return what a connection begins with, on either side: the token of the side that is spoken to."""
    return _GREETING.pack(MAGIC, token)
