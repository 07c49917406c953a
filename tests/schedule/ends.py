"""The schedules as an engine's parts call them: by the names of requests, and with one call for each end of a load or an offer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvxfer.identity import RequestId, Source, TransferId
from kvxfer.schedule import EngineRequest, FetchSchedule, Load, LoadEvent, LoadState, Offering, OfferSchedule
from kvxfer.values import BlockTable


class Loading:
    """A schedule of loads. Calls about a request that did not arrive do nothing."""

    def __init__(self, schedule: FetchSchedule) -> None:
        self.schedule = schedule

    def of(self, request: str) -> Load | None:
        """Return the load of a request that is not over."""
        known = self.schedule.requests.find(RequestId(request))
        return None if known is None else known.own_load

    def arrive(self, request: str, *what: Any, **how: Any) -> bool:
        with self.schedule.requests.of(RequestId(request)) as known:
            return self.schedule.arrive(known, *what, **how) is not None

    def matched(self, request: str, computed: int) -> int | None:
        load = self.of(request)
        return 0 if load is None else self.schedule.matched(load, computed)

    def allocated(self, request: str, table: BlockTable, computed: int, external: int) -> None:
        if (load := self.of(request)) is not None and external:
            self.schedule.fetch(load, table, computed, external, LoadEvent.FETCH)
        elif load is not None:
            self.schedule.on(load, LoadEvent.NOT_NEEDED, "the consumer does not need it")

    def unasked(self, request: str) -> None:
        if (load := self.of(request)) is not None:
            self.schedule.unasked(load)

    def finish(self, request: str, *why: str) -> None:
        if (load := self.of(request)) is not None:
            self.schedule.finish(load, *why)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def __iter__(self) -> Iterator[Load]:
        return iter(self.schedule)

    def __len__(self) -> int:
        return len(self.schedule)


class Offers:
    """A schedule of offerings. Calls about a request that did not arrive do nothing."""

    def __init__(self, schedule: OfferSchedule) -> None:
        self.schedule = schedule

    def of(self, request: str) -> EngineRequest | None:
        return self.schedule.requests.find(RequestId(request))

    def run_by(self, request: str) -> Offering | None:
        """Return the offering that a running request computes."""
        known = self.of(request)
        return None if known is None else known.computing

    def arrive(self, request: str, *what: Any, **how: Any) -> bool:
        with self.schedule.requests.of(RequestId(request)) as known:
            return self.schedule.arrive(known, *what, **how)

    def step(self, request: str, *step: Any) -> None:
        if (found := self.run_by(request)) is not None:
            self.schedule.step(found, *step)

    def preempt(self, request: str) -> None:
        if (found := self.run_by(request)) is not None:
            self.schedule.preempt(found)

    def finish(self, request: str, table: BlockTable, complete: bool, **how: Any) -> bool:
        with self.schedule.requests.of(RequestId(request)) as known:
            return self.schedule.finish(known, table, complete, **how)

    def __contains__(self, request: str) -> bool:
        return total(self, request) > 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.schedule, name)

    def __iter__(self) -> Iterator[Offering]:
        return iter(self.schedule)

    def __len__(self) -> int:
        return len(self.schedule)


def loaded(schedule: Loading, request: str) -> None:
    """All workers have reported the request's load: it is over, and its memory quiet."""
    known = schedule.schedule.requests.find(RequestId(request))
    if known is not None and known.load is not None and known.load.under_way:
        schedule.schedule.on(known.load, LoadEvent.ENDED)


def preempt(schedule: Loading, request: str) -> None:
    """The engine takes the request's blocks away."""
    if (load := schedule.of(request)) is not None:
        schedule.schedule.on(load, LoadEvent.TAKE_BLOCKS, "the consumer preempted the request")


def waiting(schedule: Loading) -> dict[TransferId, tuple[bytes, Source]]:
    """The transfers that workers do not know yet, with digest and producer."""
    loaded = [load.transfer for load in schedule if load.state in (LoadState.WAITING, LoadState.OPEN)]
    return {one.name: (one.digest, one.source) for one in loaded}


def released(schedule: Offers, transfer: TransferId, generation: int) -> str | None:
    """All ranks are done with a transfer up to a generation; return the request whose held blocks are now free."""
    freed = None
    for found in list(schedule.under(transfer)):
        if schedule.done(found, generation) and found.request:
            freed = found.request
    return freed


def held(schedule: Offers | OfferSchedule) -> frozenset[TransferId]:
    """The transfers whose request has finished and whose blocks are held."""
    return frozenset(found.transfer for found in schedule if found.held)


def total(schedule: Offers, request: str) -> int:
    """How many tokens a running request will offer; 0 if it is not tracked."""
    known = schedule.of(request)
    found = None if known is None else known.own_offering
    return found.total if found is not None and found.tracked else 0
