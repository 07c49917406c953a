"""Where a process's memories lie, as it tells another process of its host over their socket: in a file without a name.

They may be thousands of regions, and a message of a socket is short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from kvxfer.backend.passed import MAX_BYTES, passed, taken
from kvxfer.errors import UNREADABLE, PeerError
from kvxfer.geometry.region import Region

Address = Annotated[int, Meta(gt=0, lt=1 << 62)]


class Exported(msgspec.Struct, frozen=True, array_like=True):
    """One memory: its number, where the key of the link stands, and address and size of each region."""

    number: Annotated[int, Meta(ge=0, lt=4096)]
    key_address: Address
    pieces: tuple[tuple[Address, Address], ...]

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(Region(address, nbytes) for address, nbytes in self.pieces)


def written(exported: Sequence[Exported]) -> int:
    """Return a descriptor of a file that says this, which the caller must close.

    Raises:
        OSError: No descriptor is left, or there are more regions than any engine has.
    """
    said = msgspec.msgpack.encode(exported)
    if len(said) > MAX_BYTES:
        raise OSError(
            f"this side's regions take {len(said)} bytes to tell, more than {MAX_BYTES}; register fewer, longer ones"
        )
    return passed(said, "kvxfer-cma-regions")


def read_back(fd: int) -> list[Exported]:
    """Return what such a file says.

    Raises:
        PeerError: It is no such file, or says nothing that makes sense.
    """
    try:
        found = msgspec.msgpack.decode(taken(fd), type=list[Exported])
    except UNREADABLE as e:
        raise PeerError(f"its description of its memory makes no sense ({e})") from e
    if len({one.number for one in found}) < len(found):
        raise PeerError("its description of its memory is too long, or came twice")
    return found
