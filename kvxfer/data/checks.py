"""Checksums of parts that have arrived, if a device computes them: the data thread starts them and goes on.

That wakes two threads fewer than ``hasher.py`` would. A checksum that fails here is left to it, and it reports why.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from kvxfer import memory
from kvxfer.geometry import Region
from kvxfer.logs import logger
from kvxfer.memory import Checksum, Fence, Space
from kvxfer.protocol.values import Move, Moved, PartRef

__all__ = ["Checks"]

log = logger("kvxfer.data")


class Checks:
    """Makes checksums of parts that have arrived. Used by the data thread only."""

    def __init__(self, regions: tuple[Region, ...], post: Callable[[Moved], None]) -> None:
        self._regions, self._post = regions, post
        self._space: Space | None = None
        self._ready: dict[PartRef, Callable[[Fence | None], Checksum]] = {}
        self._reading: list[tuple[Moved, Checksum]] = []

    def __len__(self) -> int:
        return len(self._reading)

    def get_ready(self, action: Move) -> None:
        """Prepare a part's checksum while it is on its way; ``end`` or ``forget`` must follow."""
        if action.check is None:
            return
        try:
            self._space = space = self._space or memory.space(self._regions)
            if space.by_itself:
                self._ready[action.ref] = space.prepare_checksum(action.check, "destination")
        except BaseException:
            log.exception("a checksum could not be prepared")

    def end(self, moved: Moved) -> None:
        """Handle the end of a part; if it has arrived and is to be checked, report its end only once that is done."""
        begin = self._ready.pop(moved.ref, None)
        if begin is not None and moved.failure is None:
            try:
                self._reading.append((moved, begin(None)))
                return
            except BaseException:
                log.exception("a checksum could not be begun")
        self._post(moved)

    def look(self) -> None:
        """Report the parts whose checksums are done."""
        for reading in list(self._reading):
            moved, checksum = reading
            try:
                if not checksum.fence.passed():
                    continue
                moved = msgspec.structs.replace(moved, checksum=checksum.value)
            except BaseException:
                log.exception("a checksum failed")
            self._reading.remove(reading)
            self._post(moved)

    def forget(self) -> None:
        """Drop the parts that have not ended, since they never will."""
        self._ready.clear()

    def wait(self) -> None:
        """Wait until no checksum is being made."""
        for _, checksum in self._reading:
            with suppress(Exception):  # nobody needs the results any more
                checksum.value  # noqa: B018  (waits)
