"""The engine's steps: how fast they compute prompts, and how long an engine that is to stop goes on making them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvxfer import clock
from kvxfer.engine import SchedulerSide
from kvxfer.logs import logger
from kvxfer_vllm.internals import EngineLoop

log = logger("kvxfer.vllm")

MIN_TOKENS = 256
"""Tokens of prompts in a step whose time counts. Of shorter steps, most goes into the step itself."""
FULL_TOKENS = 1024
"""Tokens of prompts in a step that is full, or half of the most if that is more. Once there was one, shorter ones do not count."""


class PromptPace:
    """Times steps; one thread.

    Args:
        takes: Told the tokens of prompts that a step has computed, and the seconds that it took.
        most: The most tokens of a step.
        ahead: The most steps that have begun and not ended: more than one with asynchronous scheduling.
    """

    def __init__(self, takes: Callable[[int, float], None], most: int, ahead: int) -> None:
        self._takes, self._full, self._least = takes, max(FULL_TOKENS, most // 2), MIN_TOKENS
        self._begun: deque[tuple[int, float]] = deque(maxlen=ahead)
        self._ended = 0.0  # when the last step ended

    def begins(self, tokens: int, requests: int) -> None:
        """Record that a step begins, with its tokens and its requests; of each answer it computes one token."""
        self._begun.append((tokens if tokens - requests >= self._least else 0, clock.now()))

    def ended(self) -> None:
        """Record that the oldest step has ended. It was computed from its beginning on, or from the end of the one before."""
        now = clock.now()
        tokens, begun = self._begun.popleft() if self._begun else (0, now)
        if tokens:
            self._takes(tokens, now - max(begun, self._ended))
            if tokens >= self._full:
                self._least = self._full
        self._ended = now


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
        now, asked = clock.now(), self._side.answered.inquiries
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
