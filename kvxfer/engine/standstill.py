"""Engines that wait for each other: the blocks of each are held for the other, so that neither can admit a request."""

from __future__ import annotations

from kvxfer import clock
from kvxfer.logs import logger
from kvxfer.schedule import Offering, OfferSchedule
from kvxfer.text import printable

log = logger("kvxfer.engine")

STANDSTILL_S = 2.0
"""Seconds without blocks for any request, after which blocks that are held for others are given up."""


class Standstill:
    """Ends a standstill: gives up what is held for others, the oldest first, one offering at a time."""

    def __init__(self, schedule: OfferSchedule) -> None:
        self._schedule = schedule
        self._since: float | None = None  # when the engine was first seen to stand still
        self._given_up: Offering | None = None

    def look(self, still: bool) -> None:
        """Record, once a step, whether the engine can run nothing for want of blocks."""
        if not still:
            self._since = self._given_up = None
            return
        now = clock.now()
        self._since = now if self._since is None else self._since
        if now - self._since < STANDSTILL_S or (self._given_up is not None and self._given_up.held):
            return
        self._given_up = next((found for found in self._schedule if found.held), None)
        if self._given_up is not None:
            name = printable(self._given_up.name)
            log.warning("request %s, held for another engine, is given up: no request here can get blocks", name)
            why = "the producer needed the blocks: no request of its own could get any"
            self._schedule.withdraw(self._given_up.transfer, why)
