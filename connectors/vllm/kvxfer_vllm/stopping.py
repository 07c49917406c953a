"""An engine that is shut down stays for a while, because its KV is of use elsewhere: to requests whose clients go on at another engine.

vLLM ends its engine as soon as no request runs. With ``--shutdown-timeout`` it waits for those that run, and it asks its connector
whether there is something left to do.
"""

from __future__ import annotations

import time

from kvxfer.engine import SchedulerSide
from kvxfer.logs import logger
from kvxfer_vllm.engine_loop import EngineLoop

__all__ = ["Stopping"]

log = logger("kvxfer.vllm")

CLOSE_S = 2.0
"""Seconds of vLLM's time for its shutdown that are left to end connections and processes."""


class Stopping:
    """Decides how long an engine stays; the engine's thread.

    Args:
        loop: What knows that it has been asked to stop.
        side: What others ask.
        quiet: Seconds since the last request or question after which it need not stay.
        timeout: Seconds that vLLM gives its engine (``--shutdown-timeout``), after which it is killed.
    """

    def __init__(self, loop: EngineLoop, side: SchedulerSide, quiet: float, timeout: float) -> None:
        self._loop, self._side, self._quiet, self._timeout = loop, side, quiet, timeout
        self._until: float | None = None
        self._asked = 0  # inquiries that had come at the last look

    def look(self, busy: bool) -> None:
        """Notice that the engine is to stop. Call it with each step, and when vLLM asks whether something is left to do.

        Args:
            busy: Whether a request runs, or others have been promised what is held for them.
        """
        if not self._loop.stopping:
            return
        now, asked = time.monotonic(), self._side.answered.inquiries
        if self._until is None:
            self._until = now + self._timeout - CLOSE_S
            if self._quiet and now < self._until:
                log.info(
                    "the engine is to stop: others can ask for what it holds until %g s after its last request and their last question, "
                    "and for %g s at the most",
                    self._quiet,
                    self._timeout,
                )
        elif not busy and asked == self._asked:
            return
        self._asked = asked
        self._side.drain(max(0.0, min(self._quiet, self._until - now)))
