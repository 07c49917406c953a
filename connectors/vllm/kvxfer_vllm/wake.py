"""vLLM's engine loop, which makes no steps while it has no requests and then hears nothing but its own input queue."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["EngineLoop"]


class EngineLoop:
    """The engine loop that is being built while this is made, if there is one.

    vLLM gives connectors no handle of their engine, so it is looked for among the callers.
    """

    def __init__(self) -> None:
        core = _core()
        inbox = getattr(core, "input_queue", None)
        self._inbox = inbox if isinstance(inbox, queue.Queue) else None
        parallel = getattr(getattr(core, "vllm_config", None), "parallel_config", None)
        self._by_itself = getattr(parallel, "data_parallel_size", 1) == 1

    @property
    def waker(self) -> Callable[[], None] | None:
        """What wakes the loop, for any thread to call; None if there is no such loop, or none that sleeps."""
        inbox = self._inbox
        if inbox is None:
            return None
        try:
            from vllm.v1.engine import EngineCoreRequestType

            word = EngineCoreRequestType.WAKEUP
        except (ImportError, AttributeError):
            return None
        return lambda: inbox.put_nowait((word, None))

    @property
    def arriving(self) -> Callable[[], bool] | None:
        """What tells whether something has come that the loop has not looked at yet.

        None if that is not known, or if other engines wait for each of its steps (data parallelism).
        """
        inbox = self._inbox
        return None if inbox is None or not self._by_itself else lambda: not inbox.empty()


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
