"""Renew the leases of transfers that requests here wait for; on a thread, because an engine that is paused makes no steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvxfer import clock
from kvxfer.identity import Source
from kvxfer.logs import logger
from kvxfer.protocol.messages import Named, Renew
from kvxfer.schedule import Load, LoadState
from kvxfer.threads import NamedThread

log = logger("kvxfer.engine")

RENEWED = 20
"""The leases for which a transfer is renewed that no worker begins to fetch. Then its producer may free the blocks. Otherwise two
engines whose caches are full of blocks that each holds for the other would wait for ever."""

WAITING = (LoadState.WAITING, LoadState.OPEN)
"""The states of loads that workers do not know yet; once they fetch, their agents keep the lease."""


class Renewals:
    """Renews the transfers of the loads that wait, four times a lease."""

    def __init__(
        self, lease: float, tell: Callable[[Source, Renew], None], loads: Callable[[], Iterable[Load]]
    ) -> None:
        self._interval, self._longest, self._tell, self._loads = lease / 4, lease * RENEWED, tell, loads
        self._change = threading.Condition()
        self._closed = False
        self._thread = NamedThread(target=self._run, name="kvxfer-renewals")

    def start(self) -> None:
        """Begin, with the first load."""
        if not self._thread.ident and not self._closed:
            self._thread.start()

    def begin_close(self) -> None:
        """Begin to stop, and return at once."""
        with self._change:
            self._closed = True
            self._change.notify()

    def close(self) -> None:
        """Stop renewing; blocks until the thread has ended."""
        self.begin_close()
        if self._thread.ident:
            self._thread.join(1.0)

    def _run(self) -> None:
        with self._change:
            while not self._change.wait_for(lambda: self._closed, self._interval):
                self._renew()

    def _renew(self) -> None:
        since, by_source = clock.now() - self._longest, dict[Source, set[Named]]()
        for load in self._loads():
            if load.state in WAITING and load.came_at > since:
                loaded = load.transfer
                by_source.setdefault(loaded.source, set()).add(Named(loaded.name, loaded.digest))
        for source, named in by_source.items():
            try:
                self._tell(source, Renew(source.epoch, tuple(named)))
            except Exception:  # else the leases of the others would end as well
                log.exception("%d transfers of %s could not be renewed", len(named), source)
