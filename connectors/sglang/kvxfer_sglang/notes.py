"""What prefill and decode ranks tell each other over SGLang's own sockets, besides SGLang's word that a request is aborted.

A room may be used again once its request is over. So a decode rank draws a number for each attempt, and every answer
repeats it.
"""

from __future__ import annotations

import msgspec

from kvxfer import PeerError
from kvxfer.errors import UNREADABLE

TAG = b"KVXFER"
"""The first frame; in the second lies the note."""


class PagesWanted(msgspec.Struct, frozen=True, tag=True):
    """Decode to prefill: pages are there for a request's KV."""

    room: int  # the request's ``bootstrap_room``
    attempt: int  # the decode rank's number for it
    endpoint: str  # the decode rank's host
    dst_port: int  # the port at which it hears
    prefix: int  # tokens that it has cached, in whole pages
    required_dst_info_num: int  # how many decode ranks tell this prefill rank of the request
    stages: int = 1  # pipeline stages of the decode server


class PagesOffered(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: a request has its turn, and its pages are offered as they are computed."""

    room: int  # the request's ``bootstrap_room``
    attempt: int  # the attempt of the ``PagesWanted``
    ticket: str  # what is to be fetched; empty where there is no page to move
    aux: bytes = b""  # if there are no pages, SGLang's metadata of the request; otherwise these come with the pages


class AttemptFailed(msgspec.Struct, frozen=True, tag=True):
    """Prefill to decode: nothing will come, or what has come is void. Decode tells the other prefill ranks of it."""

    room: int
    attempt: int
    reason: str


_DECODER = msgspec.msgpack.Decoder(PagesWanted | PagesOffered | AttemptFailed)


def packed(note: PagesWanted | PagesOffered | AttemptFailed) -> list[bytes]:
    """Return a note as the frames of a message."""
    return [TAG, msgspec.msgpack.encode(note)]


def unpacked(frames: list[bytes]) -> PagesWanted | PagesOffered | AttemptFailed:
    """Return the note in a message.

    Raises:
        PeerError: There is none.
    """
    if len(frames) != 2 or frames[0] != TAG:
        raise PeerError(
            f"a message of {len(frames)} frames that begins with {frames[0][:20] if frames else b''!r} is not a note"
        )
    try:
        note: PagesWanted | PagesOffered | AttemptFailed = _DECODER.decode(frames[1])
    except UNREADABLE as error:
        raise PeerError(f"a note that cannot be read: {error}") from None
    return note
