"""Bytes that are no message, at each place where a peer's bytes are decoded: they are refused, and nothing else happens.

Arrays in arrays, thousands deep, end in RecursionError, and text that is no UTF-8 in UnicodeDecodeError, neither of which is an error of
msgspec's.
"""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvxfer import Ticket
from kvxfer.backend.endpoint import EndpointBase
from kvxfer.errors import KvxferError
from kvxfer.protocol import messages as m
from kvxfer_cma import exported
from kvxfer_nccl import wire
from kvxfer_sglang import notes

ROOT = Path(__file__).parents[1]
DEPTH = 1500

GARBLED = {
    "arrays in arrays": b"\x91" * DEPTH,
    "arrays behind what is expected": b"\x9f" + b"\x01" * 14 + b"\x91" * DEPTH,
    "maps in maps": b"\x81\xa1x" * DEPTH,
    "a field that is not known": b"\x81\xa1x" + b"\x91" * DEPTH + b"\xc0",
    "text that is no UTF-8": b"\x92\xa2\xff\xfe\xa2\xff\xfe",
    "a key that is no UTF-8": b"\x81\xa2\xff\xfe\x01",
    "numbers beyond 64 bits": b"\x92\x03\xcf" + b"\xff" * 8,
    "four billion elements": b"\xdd\xff\xff\xff\xff",
    "four billion bytes": b"\xc6\xff\xff\xff\xff",
    "a time beyond all times": b"\xc7\x0c\xff" + b"\xff" * 12,
    "nothing": b"",
}


class Mine(EndpointBase, frozen=True):
    backend = "mine"
    format = 1
    names: tuple[str, ...] = ()


def endpoint(garbled: bytes) -> object:
    said = b"mine 1 " + garbled
    return Mine.decode(said + zlib.crc32(said).to_bytes(4))


def regions(garbled: bytes) -> object:
    fd = exported.passed(garbled, "garbled")
    try:
        return exported.read_back(fd)
    finally:
        os.close(fd)


def ticket(garbled: bytes) -> object:
    begins = Ticket.read.__globals__["_VERSION"]
    return Ticket.read(begins + base64.urlsafe_b64encode(zlib.crc32(garbled).to_bytes(4) + garbled).decode())


DECODERS: dict[str, Callable[[bytes], object]] = {
    "a message": m.decode,
    "an endpoint": endpoint,
    "a message of nccl": lambda garbled: wire.decode(bytearray(len(garbled).to_bytes(4) + garbled)),
    "the regions of cma": regions,
    "a ticket": ticket,
    "a note of sglang": lambda garbled: notes.unpacked([notes.TAG, garbled]),
    "a field of a note of sglang": lambda garbled: notes.unpacked(
        [notes.TAG, b"\x82\xa4type\xadAttemptFailed\xa1x" + garbled]
    ),
}


@pytest.mark.parametrize("what", DECODERS)
@pytest.mark.parametrize("how", GARBLED)
def test_what_cannot_be_read_is_refused(what: str, how: str) -> None:
    with pytest.raises((KvxferError, ValueError)) as caught:
        DECODERS[what](GARBLED[how])
    assert not isinstance(caught.value, msgspec.MsgspecError | UnicodeDecodeError)
