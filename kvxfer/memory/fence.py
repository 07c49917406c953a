"""Fences for the work of this process: none on a CPU, events of torch's on CUDA."""

from __future__ import annotations

from typing import Any

from kvxfer.fence import Fence

__all__ = ["CudaEvent", "Done", "Events", "fence"]


class Done:
    """Work that has happened already, as on a CPU."""

    event = None

    def passed(self) -> bool:
        return True


class CudaEvent:
    """Passed when everything recorded before the event on its stream has run."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def passed(self) -> bool:
        return bool(self.event.query())


class Events:
    """Events of torch's on one device, each recorded anew when nobody has its fence any more: one that has never been recorded is
    slow to record. Fences may be dropped on any thread."""

    def __init__(self) -> None:
        self._free: list[Any] = []

    def record(self, stream: Any) -> CudaEvent:
        """Passed when all has run that this stream was given so far."""
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event()
        event.record(stream)
        return _Lent(event, self._free)


class _Lent(CudaEvent):
    def __init__(self, event: Any, home: list[Any]) -> None:
        super().__init__(event)
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.event)


def fence(device: str) -> Fence:
    """What the calling thread has started on a device so far: on CUDA an event on its current stream, else nothing."""
    if device.partition(":")[0] != "cuda":
        return Done()
    import torch

    return CudaEvent(torch.cuda.current_stream(torch.device(device)).record_event())
