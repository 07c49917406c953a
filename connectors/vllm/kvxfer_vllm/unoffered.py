"""Tell of requests that a router asked to have offered to other engines, and that are not: in a metric, and in a bounded log."""

from __future__ import annotations

from kvxfer.logs import logger
from kvxfer.security import Repeats
from kvxfer.text import printable
from kvxfer_vllm.requests import LoadOutcomes
from kvxfer_vllm.stats import Reason

__all__ = ["Unoffered"]

log = logger("kvxfer.vllm")

EVERY_S = 10.0
"""Seconds from one log line of a reason to the next."""


class Unoffered:
    """The requests that are not offered although that was asked; one thread."""

    def __init__(self, outcomes: LoadOutcomes) -> None:
        self._outcomes = outcomes
        self._repeats = Repeats(EVERY_S)

    def say(self, request: str, reason: Reason, why: str) -> None:
        """Count a request, and log it unless another was logged for this reason just now."""
        self.count(reason)
        held = self._repeats.logged(reason)
        if held is not None:
            more = f" ({held} more like this were not logged)" if held else ""
            log.warning("request %s is not offered to other engines (%s): %s%s", printable(request), reason, why, more)

    def count(self, reason: Reason) -> None:
        """Count a request whose line is logged elsewhere."""
        self._outcomes.not_offered(str(reason))
