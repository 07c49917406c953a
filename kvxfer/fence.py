"""A fence tells whether work on a device has happened. Engines, memory and back ends share this one protocol."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Fence"]


@runtime_checkable
class Fence(Protocol):
    """Work that must have happened before memory may be touched (for CUDA: an event that the engine recorded).

    The event may be recorded again once nobody holds the fence any more, so keep the fence as long as you use its event.
    """

    def passed(self) -> bool:
        """Return whether the work has happened. Never blocks."""

    @property
    def event(self) -> Any:
        """The device event, for those who wait for it on a stream; ``None`` if there is none."""
