"""vLLM's engine loop: wake it, and see whether it has been asked to stop. vLLM gives connectors no handle of it."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["EngineLoop"]


class EngineLoop:
    """The loop of the engine that is being built while this is made, if it has one: it is looked for among the callers.

    Attributes:
        wake: Wakes it; it makes no steps while it has no requests, and then hears nothing but its own input queue. Any thread may call
            it. None: there is no loop, or none that sleeps.
    """

    def __init__(self) -> None:
        self._core = _core()
        self.wake = _waker(self._core)

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop, as by SIGTERM. vLLM then takes no more requests."""
        return bool(getattr(self._core, "shutdown_state", 0))


def _waker(core: Any) -> Callable[[], None] | None:
    inbox = getattr(core, "input_queue", None)
    if not isinstance(inbox, queue.Queue):
        return None
    try:
        from vllm.v1.engine import EngineCoreRequestType

        word = EngineCoreRequestType.WAKEUP
    except (ImportError, AttributeError):
        return None
    return lambda: inbox.put_nowait((word, None))


def _core() -> Any:
    """Return the engine that is being built, if one is."""
    try:
        from vllm.v1.engine.core import EngineCoreProc
    except ImportError:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCoreProc):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
