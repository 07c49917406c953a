"""What an engine's parts make of the schedules' calls: the ends of loads and offers, in one call each."""

from __future__ import annotations

from kvxfer.identity import Source, TransferId
from kvxfer.schedule import FetchSchedule, LoadEvent, LoadState, OfferSchedule
from kvxfer.values import BlockTable


def loaded(schedule: FetchSchedule, request: str) -> None:
    """All workers have reported the request's load: it is over, and its memory quiet."""
    load = schedule.named(request)  # type: ignore[arg-type]
    if load is not None and load.under_way:
        schedule.on(load, LoadEvent.ENDED)


def preempt(schedule: FetchSchedule, request: str) -> None:
    """The engine takes the request's blocks away."""
    load = schedule.of(request)  # type: ignore[arg-type]
    if load is not None:
        schedule.on(load, LoadEvent.TAKE_BLOCKS, "the consumer preempted the request")


def waiting(schedule: FetchSchedule) -> dict[TransferId, tuple[bytes, Source]]:
    """The transfers that workers do not know yet, with digest and producer."""
    wanted = [load.wanted for load in schedule if load.state in (LoadState.WAITING, LoadState.OPEN)]
    return {one.transfer: (one.digest, one.source) for one in wanted}


def released(schedule: OfferSchedule, transfer: TransferId, generation: int) -> str | None:
    """All ranks are done with a transfer up to a generation; return the request whose held blocks are now free."""
    freed = None
    for found in list(schedule.under(transfer)):
        if schedule.done(found, generation) and found.request:
            freed = found.request
    return freed


def held(schedule: OfferSchedule) -> frozenset[TransferId]:
    """The transfers whose request has finished and whose blocks are held."""
    return frozenset(found.transfer for found in schedule if found.held)


def offered(schedule: OfferSchedule, request: str) -> BlockTable:
    """The blocks of a running request that other engines may be reading."""
    found = schedule.run_by(request)  # type: ignore[arg-type]
    return schedule._nothing if found is None else found.blocks


def total(schedule: OfferSchedule, request: str) -> int:
    """How many tokens a running request will offer; 0 if it is not tracked."""
    found = schedule.of(request)  # type: ignore[arg-type]
    return found.total if found is not None and found.tracked else 0
