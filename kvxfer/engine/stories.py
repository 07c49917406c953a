"""How loads and offers went. What there is to tell of one is on its record; its story is closed here, once, and then read by all who tell.

The last ones are kept in memory, for an operator who asks: `kvxfer why`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from kvxfer import clock
from kvxfer.control.stories import KEPT, STAGES, about, copied, latest, told_name, told_text
from kvxfer.protocol.messages import Explain, Explained, Story
from kvxfer.protocol.messages.bounds import MAX_WORDS
from kvxfer.schedule import Load, LoadState, Offering, Schedule
from kvxfer.values import OfferEnd

Record = Callable[[], Story]

WAITED = "the request ended while its load waited for free blocks of this engine"
NOT_BEGUN = {
    **dict.fromkeys(LoadState, "nothing had to be loaded: all of it was cached here, or another request brought it"),
    LoadState.WAITING: "the request ended before the producer had begun with it",
    LoadState.OPEN: WAITED,
    LoadState.SHARED: WAITED,
}
"""Why a load was never begun, by where it was when its request ended."""


class Stories:
    """The last requests of one engine. One thread records; any thread may ask.

    Closing a story costs an append: it is told when somebody asks for it.

    Attributes:
        live: What the engine has in hand.
        readers: Who else tells how a load went, each called with it when its story is closed; not of one whose request is over.
    """

    def __init__(self, engine: str) -> None:
        self._engine, self.live = engine, Schedule(())
        self.readers: list[Callable[[Load], None]] = []
        self._good: deque[Record] = deque(maxlen=KEPT)
        self._bad: deque[Record] = deque(maxlen=KEPT)
        self._notes: deque[Record] = deque(maxlen=KEPT)

    # --- the scheduler's thread --------------------------------------------------------------------------------------

    def load_ended(self, load: Load) -> None:
        """Close the story of a load: it is known how it ends, or its request is over before it was begun."""
        if load.over_at:
            return
        load.over_at = clock.now()
        if load.fetched is None and load.failure is None:
            self._good.append(partial(_of_none, load, NOT_BEGUN[load.state]))
        else:
            (self._good if load.failure is None else self._bad).append(partial(of_load, load))
        if load.fetched is not None and not load.over:
            for read in self.readers:
                read(load)

    def offer_ended(self, offering: Offering, end: OfferEnd) -> None:
        """Close the story of an offer."""
        if offering.ended is None:
            offering.ended = end
            (self._good if end.failure is None else self._bad).append(partial(_of_offering, offering))

    def takes_no_part(self, request: str, why: str) -> None:
        """Record that a request neither loads nor offers what it was to."""
        begun, text = clock.now(), told_text(why, MAX_WORDS)
        self._notes.append(
            lambda: Story("none", told_text(request), outcome="no transfer", text=text, at=_unix_time(begun))
        )

    # --- any thread --------------------------------------------------------------------------------------------------

    def explain(self, asked: Explain) -> Explained:
        """Return what is known of the requests that are asked for."""
        failed = not (asked.request or asked.transfers)
        stories = (record() for record in copied(self._bad)) if failed else self._about(asked)
        return Explained(self._engine, time.time(), KEPT, latest(stories, asked.most))

    def _about(self, asked: Explain) -> Iterator[Story]:
        schedule = self.live
        live = [of_load(load) for load in schedule.consumer if not load.over_at]
        live += [_of_offering(offering) for offering in schedule.producer if offering.ended is None]
        over = (record() for kept in (self._good, self._bad, self._notes) for record in copied(kept))
        return filter(about(asked), (*live, *over))


def _unix_time(at: float) -> float:
    """Return a time of ``kvxfer.clock`` by this host's clock as it goes now, which may have been set since."""
    return time.time() - (clock.now() - at)


def of_load(load: Load) -> Story:
    """Return what there is to tell of a load, which is on its record."""
    over, failure, now = bool(load.over_at or load.failure), load.failure, load.over_at or clock.now()
    stages = load.stages if load.over_at else None
    reached = {} if stages is None else {name: getattr(stages, name) for name in STAGES}
    times = {"found": load.found_at, "fetched": load.fetched_at, **reached, **({"seen": now} if over else {"now": now})}
    if not times.get("announced"):
        times["heard"] = 0.0  # of a fetch that has heard nothing it is the beginning
    outcome = "delivered" if failure is None else str(failure.kind)
    return Story(
        "consumer",
        told_text(load.request),
        *told_name(load.transfer.name),
        f"{load.transfer.source.host}:{load.transfer.source.port}",
        outcome if over else str(load.state),
        over,
        "" if failure is None else told_text(failure, MAX_WORDS),
        _unix_time(load.came_at),
        {stage: round(t - load.came_at, 6) for stage, t in times.items() if t},
        max(load.end - load.start, 0) or load.transfer.tokens,
        0 if stages is None else stages.came,
        0 if stages is None else stages.announced_bytes,
        0.0 if stages is None else round(stages.moving, 6),
    )


def _of_none(load: Load, why: str) -> Story:
    return replace(of_load(load), outcome="not loaded", text=why)


def _of_offering(offering: Offering) -> Story:
    end = offering.ended
    times = {"begun": offering.begun_at, "computed": offering.whole_at, "ended": 0.0 if end is None else end.at}
    if end is None:
        times["now"] = clock.now()
    failure = None if end is None else end.failure
    outcome = str(offering.state) if end is None else "delivered" if failure is None else str(failure.kind)
    return Story(
        "producer",
        told_text(offering.request),
        *told_name(offering.transfer),
        outcome=outcome,
        over=end is not None,
        text="" if failure is None else told_text(failure, MAX_WORDS),
        at=_unix_time(offering.came_at),
        stages={stage: round(t - offering.came_at, 6) for stage, t in times.items() if t},
        tokens=offering.total,
        came=0 if end is None else end.nbytes,
    )
