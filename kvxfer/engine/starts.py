"""Loads whose producers have not begun, as far as is known, and which therefore need no blocks yet.

A router may send a request to both engines at once. It may then queue at the producer for long, and blocks set aside for
it here all that time would be lost to other requests. So the producer's directory is asked, and says when its engine has
begun. If it cannot be asked, the load begins, and fails as any load would.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Await, Named

__all__ = ["Starts"]

AGAIN_S = 1.0
"""Seconds after which a producer is asked again: it may not have been there, or its answer may be lost."""


@dataclass(slots=True)
class _Start:
    named: Named
    source: Source
    since: float
    asked: float


class Starts:
    """Requests that wait for their producers to begin, each for ``patience`` seconds at the most. One thread."""

    def __init__(
        self, patience: float, tell: Callable[[Source, Await], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience, self._tell, self._clock = patience, tell, clock
        self._waiting: dict[str, _Start] = {}

    def ask(self, request: str, transfer: TransferId, digest: bytes, source: Source) -> None:
        """Ask the producer whether it has begun, unless it has been asked."""
        if request not in self._waiting:
            now = self._clock()
            start = self._waiting[request] = _Start(Named(transfer, digest), source, now, now)
            self._tell(source, Await(source.epoch, (start.named,)))

    def ask_again(self) -> None:
        """Ask those producers again that have not answered for a while; call it once a step."""
        now, silent = self._clock(), dict[Source, list[Named]]()
        for start in self._waiting.values():
            if now - start.asked >= AGAIN_S:
                start.asked = now
                silent.setdefault(start.source, []).append(start.named)
        for source, named in silent.items():
            self._tell(source, Await(source.epoch, tuple(named)))

    def begun(self, named: tuple[Named, ...]) -> None:
        """Record that producers have begun with these transfers."""
        self._waiting = {request: start for request, start in self._waiting.items() if start.named not in named}

    def unheard(self, host: str, port: int) -> None:
        """Record that the directory at this address cannot be asked."""
        for request, start in list(self._waiting.items()):
            if (start.source.host, start.source.port) == (host, port):
                del self._waiting[request]

    def __contains__(self, request: str) -> bool:
        """Return whether a request waits for its producer to begin."""
        return request in self._waiting

    def late(self, request: str) -> bool:
        """Return whether a request has waited longer than its patience."""
        return self._clock() - self._waiting[request].since >= self.patience

    def forget(self, request: str) -> None:
        """Record that nobody needs this load any more."""
        self._waiting.pop(request, None)

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._waiting)
