"""Tell of requests that a router wanted transferred, and that are not: in a metric, in a bounded log, and to `kvxfer why`."""

from __future__ import annotations

from collections.abc import Callable

from kvxfer.logs import logger
from kvxfer.security import Repeats
from kvxfer.text import printable
from kvxfer_vllm.requests import LoadOutcomes
from kvxfer_vllm.stats import Reason

__all__ = ["NoPart"]

log = logger("kvxfer.vllm")

EVERY_S = 10.0
"""Seconds from one log line of a reason to the next."""


class NoPart:
    """The requests that are not offered, or not loaded, although that was asked; one thread."""

    def __init__(self, outcomes: LoadOutcomes, remember: Callable[[str, str], None]) -> None:
        self._outcomes, self._remember = outcomes, remember
        self._repeats = Repeats(EVERY_S)

    def not_offered(self, request: str, reason: Reason, why: str) -> None:
        """Count a request that is not offered, and log it unless another was logged for this reason just now."""
        self.count(reason)
        self._remember(request, f"it is not offered to other engines ({reason}): {why}")
        if (more := self._more("offered", reason)) is not None:
            log.warning("request %s is not offered to other engines (%s): %s%s", printable(request), reason, why, more)

    def not_loaded(self, request: str, reason: Reason, why: str) -> None:
        """Count a request that is not loaded, and log it unless another was logged for this reason just now."""
        self._outcomes.counts.count("not_loaded", str(reason))
        self._remember(request, f"it is computed here: {why}")
        if (more := self._more("loaded", reason)) is not None:
            log.warning("request %s is computed here: %s%s", printable(request), why, more)

    def unreadable(self, request: str, error: Exception) -> None:
        """Record a request of which something cannot be read; the log has the place in the code, if another was not logged just now."""
        self._remember(request, "it takes no part in KV transfer: what it says cannot be read")
        if (more := self._more("read", Reason.INVALID)) is not None:
            what = "request %s takes no part in KV transfer, because what it says cannot be read%s"
            log.warning(what, printable(request), more, exc_info=error)

    def count(self, reason: Reason) -> None:
        """Count a request that is not offered and whose line is logged elsewhere."""
        self._outcomes.counts.count("not_offered", str(reason))

    def _more(self, what: str, reason: Reason) -> str | None:
        """Return how many lines of this kind were not logged, as the end of a line; None if this one is not to be logged either."""
        held = self._repeats.logged((what, reason))
        return None if held is None else f" ({held} more like this were not logged)" if held else ""
