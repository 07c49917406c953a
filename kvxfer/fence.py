"""A fence: whether work on a device has happened. What engines, memory and back ends agree on."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Fence"]


@runtime_checkable
class Fence(Protocol):
    """Work that must have happened before memory may be touched (for CUDA: an event that the engine recorded).

    It stands for the same work as long as somebody has the fence; afterwards its event may be recorded anew. So whoever
    uses the event keeps the fence.
    """

    def passed(self) -> bool:
        """Whether the work has happened. Never blocks."""

    @property
    def event(self) -> Any:
        """The device event, for users that are ordered by a stream; ``None`` if there is none."""
