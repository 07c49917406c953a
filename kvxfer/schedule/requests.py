"""The requests of an engine of which something is remembered: one record each, and the one table that finds them by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvxfer.identity import RequestId
from kvxfer.schedule.ask import Ask, AskState
from kvxfer.schedule.load import Load
from kvxfer.schedule.offering import Offering


@dataclass(slots=True, eq=False)
class EngineRequest:
    """What a request loads, offers and asks, under the name that the engine has given it.

    What a request leaves behind keeps its name: a load until it is closed, an offering while its blocks are held. Another request that is
    given this name meanwhile has no load, or no offering, of its own.
    """

    name: RequestId
    load: Load | None = None
    offering: Offering | None = None
    ask: Ask | None = None

    @property
    def asking(self) -> bool:
        """Whether other engines are asked for it, and it is not decided yet what it loads."""
        return self.ask is not None and self.ask.state in (AskState.NEW, AskState.OUT)

    @property
    def own_load(self) -> Load | None:
        """Its load; None if that was left behind by an earlier request of this name."""
        return None if self.load is None or self.load.over else self.load

    @property
    def own_offering(self) -> Offering | None:
        """Its offering, which may be over before it; None if that was left behind by an earlier request of this name."""
        found = self.offering
        return None if found is None or (found.over and self.name not in found.sharers) else found

    @property
    def computing(self) -> Offering | None:
        """The offering whose blocks are those that this request computes; None if it shares another's, or offers nothing any more."""
        found = self.offering
        return found if found is not None and found.request == self.name and found.computed else None


class EngineRequests:
    """All requests of one engine that load, offer or ask. One thread changes it."""

    def __init__(self) -> None:
        self._requests: dict[RequestId, EngineRequest] = {}

    def find(self, name: RequestId) -> EngineRequest | None:
        """Return the request of this name, if anything is remembered of it."""
        return self._requests.get(name)

    @contextmanager
    def of(self, name: RequestId) -> Iterator[EngineRequest]:
        """Find the request of this name, or begin its record, which is dropped if nothing comes of it."""
        request = self._requests.setdefault(name, EngineRequest(name))
        try:
            yield request
        finally:
            self.forget(request)

    def forget(self, request: EngineRequest) -> None:
        """Drop a record on which nothing is left."""
        if request.load is None and request.offering is None and request.ask is None:
            self._requests.pop(request.name, None)

    def __iter__(self) -> Iterator[EngineRequest]:
        """Yield all requests. Any thread, and they may change meanwhile."""
        return iter(self._requests.copy().values())

    def __len__(self) -> int:
        return len(self._requests)
