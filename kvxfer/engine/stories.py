"""How loads and offers went. What there is to tell of one is on its record; its story is closed here, once, and then read by all who tell.

The last ones are kept in memory, for an operator who asks: `kvxfer why`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from msgspec.structs import replace

from kvxfer import clock
from kvxfer.control.stories import KEPT, ClosedStories, latest, moments, told_text, transfer_story, unix_time
from kvxfer.protocol.messages import Explain, Explained, Story
from kvxfer.protocol.messages.bounds import MAX_WORDS
from kvxfer.schedule import Load, LoadState, Offering, Schedule
from kvxfer.values import OfferEnd, Stages

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
        self._closed = ClosedStories()

    # --- the scheduler's thread --------------------------------------------------------------------------------------

    def load_ended(self, load: Load) -> None:
        """Close the story of a load: it is known how it ends, or its request is over before it was begun."""
        if load.over_at:
            return
        load.over_at = clock.now()
        if load.fetched is None and load.failure is None:
            self._closed.good.append(partial(_of_none, load, NOT_BEGUN[load.state]))
        else:
            (self._closed.good if load.failure is None else self._closed.bad).append(partial(of_load, load))
        if load.fetched is not None and not load.over:
            for read in self.readers:
                read(load)

    def offer_ended(self, offering: Offering, end: OfferEnd) -> None:
        """Close the story of an offer."""
        if offering.ended is None:
            offering.ended = end
            (self._closed.good if end.failure is None else self._closed.bad).append(partial(_of_offering, offering))

    def takes_no_part(self, request: str, why: str) -> None:
        """Record that a request neither loads nor offers what it was to."""
        begun, text = clock.now(), told_text(why, MAX_WORDS)
        self._closed.none.append(
            lambda: Story("none", told_text(request), outcome="no transfer", text=text, at=unix_time(begun))
        )

    # --- any thread --------------------------------------------------------------------------------------------------

    def explain(self, asked: Explain) -> Explained:
        """Return what is known of the requests that are asked for."""
        return Explained(
            self._engine, time.time(), KEPT, latest(self._closed.tell(asked, self._under_way()), asked.most)
        )

    def _under_way(self) -> Iterator[Story]:
        yield from (of_load(load) for load in self.live.consumer if not load.over_at)
        yield from (_of_offering(offering) for offering in self.live.producer if offering.ended is None)


def of_load(load: Load) -> Story:
    """Return what there is to tell of a load, which is on its record."""
    over, stages = bool(load.over_at or load.failure), (load.stages if load.over_at else None) or Stages()
    now = {"seen" if over else "now": load.over_at or clock.now()}
    times = {"found": load.found_at, "fetched": load.fetched_at, **moments(stages), **now}
    what, state = load.transfer, "" if over else str(load.state)
    tokens = max(load.end - load.start, 0) or what.tokens
    return transfer_story(
        load.request, what.name, what.source, load.came_at, times, state, load.failure, tokens, stages
    )


def _of_none(load: Load, why: str) -> Story:
    return replace(of_load(load), outcome="not loaded", text=why)


def _of_offering(offering: Offering) -> Story:
    end = offering.ended
    times = {"begun": offering.begun_at, "computed": offering.whole_at, "ended": 0.0 if end is None else end.at}
    if end is None:
        times["now"] = clock.now()
    state = str(offering.state) if end is None else ""
    failure, nbytes = (None, 0) if end is None else (end.failure, end.nbytes)
    name, begun, tokens = offering.transfer, offering.came_at, offering.total
    return transfer_story(offering.request, name, None, begun, times, state, failure, tokens, Stages(), nbytes)
