"""Fences for the work of this process: none where all is done on return, events of torch's on devices."""

from __future__ import annotations

from typing import Any

__all__ = ["DeviceEvent", "Done", "Events"]


class Done:
    """Work that has happened already, as on a CPU."""

    event = None

    def passed(self) -> bool:
        return True


class DeviceEvent:
    """A fence that has passed when everything recorded before the event on its stream has run."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def passed(self) -> bool:
        return bool(self.event.query())


class Events:
    """Torch's events on one CUDA device, reused: one that has never been recorded is slow to record.

    An event is recorded again when its fence is dropped, which may happen on any thread.
    """

    def __init__(self) -> None:
        self._free: list[Any] = []

    def record(self, stream: Any) -> DeviceEvent:
        """Return a fence that passes when all work that this stream was given so far has run."""
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(stream)
        return _Lent(event, self._free)


class _Lent(DeviceEvent):
    def __init__(self, event: Any, home: list[Any]) -> None:
        super().__init__(event)
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.event)
