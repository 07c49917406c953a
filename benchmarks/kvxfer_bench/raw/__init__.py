"""A back end's library used by itself: the ceiling that the back end is compared with.

A distribution declares its class with an entry point (group ``kvxfer.raw``, under the back end's name). A back end without a library,
or that adds nothing to it, declares none. The modules here are those of the back ends of this repository.
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
    """One side of a library's benchmark, in a process of its own, with one region of memory.

    Methods block, as in a plainly written program, and raise whatever the library raises. In ``__init__``, ``sends``
    says whether bytes go from this side to the other.

    Attributes:
        two_sided: Whether ``move`` is called on both sides or only on the receiving one.
    """

    two_sided: ClassVar[bool]

    def __init__(self, sends: bool, region: Region, options: Mapping[str, Any]) -> None: ...

    def endpoint(self) -> bytes:
        """Return what the other side's ``connect`` takes."""

    def connect(self, theirs: bytes) -> None:
        """Connect. Called on both sides at the same time."""

    def move(self, here: Ints, there: Ints, lengths: Ints) -> Mapping[str, float] | None:
        """Move runs, at these offsets here and there, with one message or descriptor each.

        It returns when all bytes have arrived or, on the sender, may be overwritten.

        Returns:
            Seconds that each of the library's own steps took, by name, or ``None`` if there is only one.
        """

    def close(self) -> None: ...


def find(backend: str) -> type[Raw] | None:
    """Return the class that a back end is compared with, or ``None``.

    Raises:
        Exception: Whatever its import raises.
    """
    for entry in entry_points(group=GROUP, name=backend):
        return entry.load()  # type: ignore[no-any-return]
    return None
