"""How fast this engine computes prompts: the time of its steps that compute little else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

__all__ = ["PromptPace"]

LEAST = 256
"""Tokens of prompts in a step whose time counts. Of shorter steps, most goes into the step itself."""
FULL = 1024
"""Tokens of prompts in a step that is full, or half of the most if that is more. Once there was one, shorter ones do not count."""


class PromptPace:
    """Times steps; one thread.

    Args:
        takes: Told the tokens of prompts that a step has computed, and the seconds that it took.
        most: The most tokens of a step.
        ahead: The most steps that have begun and not ended: more than one with asynchronous scheduling.
    """

    def __init__(self, takes: Callable[[int, float], None], most: int, ahead: int) -> None:
        self._takes, self._full, self._least = takes, max(FULL, most // 2), LEAST
        self._begun: deque[tuple[int, float]] = deque(maxlen=ahead)
        self._ended = 0.0  # when the last step ended

    def begins(self, tokens: int, requests: int) -> None:
        """Record that a step begins, with its tokens and its requests; of each answer it computes one token."""
        self._begun.append((tokens if tokens - requests >= self._least else 0, time.monotonic()))

    def ended(self) -> None:
        """Record that the oldest step has ended. It was computed from its beginning on, or from the end of the one before."""
        now = time.monotonic()
        tokens, begun = self._begun.popleft() if self._begun else (0, now)
        if tokens:
            self._takes(tokens, now - max(begun, self._ended))
            if tokens >= self._full:
                self._least = self._full
        self._ended = now
