"""vLLM's engine loop: wake it, see whether something has come or it has been asked to stop. vLLM gives no handle of it."""

from __future__ import annotations

import queue
import sys
from collections.abc import Callable
from typing import Any

from kvxfer.engine import EngineQueue

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

    def queue(self, unfinished: Callable[[], int]) -> EngineQueue | None:
        """Return what tells whether the engine has anything else to do than to wait for loads; ``None`` if that cannot be told.

        It cannot if other engines wait for each of its steps (data parallelism).
        """
        inbox = getattr(self._core, "input_queue", None)
        parallel = getattr(getattr(self._core, "vllm_config", None), "parallel_config", None)
        alone = getattr(parallel, "data_parallel_size", 1) == 1
        if not (isinstance(inbox, queue.Queue) and alone):
            return None
        return EngineQueue(unfinished, lambda: _arriving(inbox))

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop, as by SIGTERM. vLLM then takes no more requests."""
        return bool(getattr(self._core, "shutdown_state", 0))


def _arriving(inbox: queue.Queue[Any]) -> bool:
    """Return whether anything but a call to wake is in the engine's queue: what that was for is no news to a step that waits for it."""
    from vllm.v1.engine import EngineCoreRequestType

    # Without its lock, which a signal handler may want on this thread; a copy is taken at one go.
    return any(kind is not EngineCoreRequestType.WAKEUP for kind, _ in tuple(inbox.queue))


def _waker(core: Any) -> Callable[[], None] | None:
    inbox = getattr(core, "input_queue", None)
    if not isinstance(inbox, queue.Queue):
        return None
    from vllm.v1.engine import EngineCoreRequestType

    return lambda: inbox.put_nowait((EngineCoreRequestType.WAKEUP, None))


def _core() -> Any:
    """Return the engine that is being built, if one is."""
    from vllm.v1.engine.core import EngineCoreProc

    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, EngineCoreProc):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
