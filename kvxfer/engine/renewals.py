"""Renew the leases of transfers that requests here wait for; on a thread, since an engine that is paused makes no steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Mapping

from kvxfer.identity import Source, TransferId
from kvxfer.logs import logger
from kvxfer.protocol.messages import Named, Renew
from kvxfer.threads import NamedThread

__all__ = ["RENEWED", "Renewals"]

log = logger("kvxfer.engine")

RENEWED = 10
"""A transfer that no worker begins to fetch is renewed for so many leases. Then its producer may free the blocks; two engines
whose caches are full of blocks that each holds for the other would wait for ever otherwise."""


class Renewals:
    """The transfers that are waited for, each renewed four times a lease. Any thread; only ``close`` blocks."""

    def __init__(self, lease: float, tell: Callable[[Source, Renew], None]) -> None:
        self.interval, self._longest, self._tell = lease / 4, lease * RENEWED, tell
        self._waiting: dict[TransferId, tuple[bytes, Source, float]] = {}  # and since when
        self._change = threading.Condition()
        self._closed = False
        self._thread = NamedThread(target=self._run, name="kvxfer-renewals")

    def begin(self, transfer: TransferId, digest: bytes, source: Source) -> None:
        """Renew this transfer from now on."""
        with self._change:
            if not self._thread.ident and not self._closed:
                self._thread.start()
            if transfer not in self._waiting or self._waiting[transfer][:2] != (digest, source):
                self._waiting[transfer] = digest, source, time.monotonic()

    def keep(self, waiting: Container[TransferId]) -> None:
        """From now on renew only those of the transfers begun so far that are in ``waiting``."""
        with self._change:
            self._waiting = {transfer: known for transfer, known in self._waiting.items() if transfer in waiting}

    def close(self) -> None:
        """Stop renewing."""
        with self._change:
            self._closed = True
            self._change.notify()
        if self._thread.ident:
            self._thread.join(1.0)

    def _run(self) -> None:
        with self._change:
            while not self._change.wait_for(lambda: self._closed, self.interval):
                since = time.monotonic() - self._longest
                self._renew({t: (digest, at) for t, (digest, at, begun) in self._waiting.items() if begun > since})

    def _renew(self, waiting: Mapping[TransferId, tuple[bytes, Source]]) -> None:
        by_source: dict[Source, list[Named]] = {}
        for transfer, (digest, source) in waiting.items():
            by_source.setdefault(source, []).append(Named(transfer, digest))
        for source, named in by_source.items():
            try:
                self._tell(source, Renew(source.epoch, tuple(named)))
            except Exception:  # else the leases of the others would end as well
                log.exception("%d transfers of %s could not be renewed", len(named), source)
