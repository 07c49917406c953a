"""The attempts of rank fetches, and the message to whose answer each waits.

A producer answers every such message, but messages are lost with their link. So those without an answer are repeated, at
growing intervals.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvxfer.failures import Failure, FailureKind
from kvxfer.protocol.fetch_record import FetchRecord, RankFetch
from kvxfer.protocol.routes import Routes
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.transitions import RankFetchEvent, RankFetchState
from kvxfer.protocol.values import Action, Send, link_name

Try = tuple[FetchRecord, RankFetch]
"""A fetch, and the rank fetch of it to which an attempt belongs."""

REMINDERS = 4
"""How often a producer is asked to stop writing into this side's memory before the link is closed instead."""


class Attempts:
    """The last attempt of each rank fetch. For ``timeout`` and ``retry`` see ``ConsumerMachine``."""

    def __init__(self, routes: Routes, timeout: float, retry: float) -> None:
        self.tries: dict[int, Try] = {}
        self._routes, self._links = routes, routes.links
        self._timeout, self._retry = timeout, retry
        self._numbers = count(1)
        self._questions: Timers[int] = Timers()

    def begin(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Begin an attempt of a rank fetch in LINKING if its link is up, else have the link made."""
        link = rank.spec.link
        info = self._links.get(link)
        if info is None:
            return self._routes.dial([link])
        rank.on(RankFetchEvent.LINK_UP)
        self.tries.pop(rank.attempt, None)
        rank.begin(next(self._numbers), remote_writes=info.mode == "write", least=f.least)
        self.tries[rank.attempt] = f, rank
        rank.banded = self._routes.slow(link, info, f.spec.tokens - f.spec.start)
        f.asked = now
        if f.moving_since is not None:
            f.part_over(now)
        return self.ask(f, rank, now)

    def resume(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Begin the next attempt of a paused rank fetch of which nothing moves any more."""
        if rank.state is not RankFetchState.PAUSED or not rank.quiet:
            return []
        rank.on(RankFetchEvent.QUIET)
        return self.begin(f, rank, now)

    def ask(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Send, or repeat, the message to whose answer a rank fetch waits."""
        self._questions.set(rank.attempt, now + self._retry * 2 ** min(rank.asked, 4))
        rank.asked += 1
        if self._links.get(rank.spec.link) is None:
            return []  # it is sent once there is a link
        if rank.state is RankFetchState.REQUESTED:
            return [Send(rank.spec.link, f.fetch_request(rank, now, 0.0 if f.begun else self._timeout))]
        if rank.state is RankFetchState.COMMITTING:
            return [Send(rank.spec.link, f.commit_request(rank))]
        return [Send(rank.spec.link, f.close_attempt(rank))]

    def expect(self, rank: RankFetch, now: float) -> None:
        """Expect a message about an attempt without having sent one."""
        self._questions.set(rank.attempt, now + self._retry)

    def give_up(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Void an attempt: nothing of it may move any more, on either side.

        Its producer is told; if it may be writing into this side's memory, it is told again until it has answered.
        """
        out: list[Action] = []
        self.answered(rank)
        if rank.attempt and self._links.get(rank.spec.link) is not None:
            rank.asked = 0
            out += self.ask(f, rank, now)
            if not rank.remote_writes:
                self.answered(rank)
        return out + rank.aborts

    def answered(self, rank: RankFetch) -> None:
        """Repeat no more: there is an answer, or none is needed."""
        self._questions.cancel(rank.attempt)

    def forget(self, rank: RankFetch) -> None:
        self.tries.pop(rank.attempt, None)

    def due(self, now: float) -> Iterator[Try]:
        """Take out, one by one, the attempts whose message has not been answered in time."""
        for attempt in self._questions.due(now):
            yield self.tries[attempt]

    def next(self) -> float | None:
        """Return when ``due`` next has something to yield, or ``None``."""
        return self._questions.next()

    def hopeless(self, rank: RankFetch) -> Failure | None:
        """Return why the link of an attempt must be given up, or ``None`` if its message can be repeated."""
        link = rank.spec.link
        if rank.state is RankFetchState.MOVING:
            # No explanation came from the producer. The back end may not know whether the link still works, so no link
            # outlives an error.
            return rank.error
        void = rank.state in (RankFetchState.PAUSED, RankFetchState.FAILED)
        if void and (self._links.get(link) is None or rank.asked >= REMINDERS):
            return Failure(FailureKind.PEER_LOST, "it does not close the attempt", link_name(link))
        return None
