"""A back end's library used by itself: the ceiling that the back end is compared with.

A distribution names its class by entry point (group ``kvxfer.raw``, under the back end's name). One that has no library
below it, or adds nothing to it, names none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar, Protocol

from kvxfer.geometry import Region
from kvxfer.geometry.plan import Ints

__all__ = ["GROUP", "Raw", "find"]

GROUP = "kvxfer.raw"


class Raw(Protocol):
    """One side, in a process of its own, with one region of memory. ``sends``: bytes go from this side to the other.
    Methods block, as plainly written programs do, and raise whatever the library raises.

    ``two_sided``: ``move`` is called on both sides; else on the receiving one only.
    """

    two_sided: ClassVar[bool]

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None: ...

    def endpoint(self) -> bytes:
        """What the other side's ``connect`` takes."""

    def connect(self, theirs: bytes) -> None:
        """Called on both sides at the same time."""

    def move(self, here: Ints, there: Ints, lengths: Ints) -> None:
        """Move runs with one message or descriptor each; offsets into this side's region and the other's. Returns when
        all bytes have arrived, or, at the sender, may be overwritten."""

    def close(self) -> None: ...


def find(backend: str) -> type[Raw] | None:
    """What a back end is to be compared with. Raises what importing it raises."""
    for entry in entry_points(group=GROUP, name=backend):
        return entry.load()  # type: ignore[no-any-return]
    return None
