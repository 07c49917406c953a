"""Engines that wait for each other: the blocks of each are held for the other, so that neither can admit a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvxfer.identity import TransferId
from kvxfer.logs import logger
from kvxfer.text import printable

__all__ = ["Standstill"]

log = logger("kvxfer.engine")

STANDSTILL_S = 2.0
"""Once nothing could run for want of blocks for so long, blocks that are held for others are given up."""


class Standstill:
    """Ends a standstill: gives up what is held for others, the oldest first, one request at a time.

    ``held`` is a live view of ``OfferedBlocks.held``.
    """

    def __init__(self, held: Mapping[str, TransferId], withdraw: Callable[[TransferId, str], None]) -> None:
        self._held, self._withdraw = held, withdraw
        self._since: float | None = None  # when the engine was first seen to stand still
        self._given_up: str | None = None  # the request that was given up last

    def look(self, still: bool) -> None:
        """Record, once a step, whether the engine can run nothing for want of blocks."""
        if not still:
            self._since = self._given_up = None
            return
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < STANDSTILL_S or self._given_up in self._held or not self._held:
            return
        self._given_up, transfer = next(iter(self._held.items()))
        log.warning(
            "request %s, held for another engine, is given up: no request here can get blocks",
            printable(self._given_up),
        )
        self._withdraw(transfer, "the producer needed the blocks: no request of its own could get any")
