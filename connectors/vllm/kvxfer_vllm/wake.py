"""Wake vLLM's engine loop, which makes no steps while it has no requests and then hears nothing but its own input queue."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["waker"]


def waker() -> Callable[[], None] | None:
    """Return what wakes the engine loop that is being built while this runs; None if there is no such loop, or none that sleeps.

    vLLM gives connectors no handle of their engine, so it is looked for among the callers. What is returned may be called by any thread.
    """
    core = _core()
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
