"""What goes to the workers: a step's commands with the step, and fetches ahead of it where that is safe.

Each fetch has a number, counted over the life of the engine. A fetch that went ahead comes again with its step, under
the same number, so that a worker knows it again.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer.engine.exchange import BlockCopy, Step
from kvxfer.engine.side_channel import ChannelAddress, DirectFetches, RankResult, SideChannel
from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Schedule, StepCommands
from kvxfer.values import Fetch, Rank

__all__ = ["Dispatch"]

MOST_PREPARED = 1024
"""Engines of which it is remembered that links to them have been asked for."""


class Dispatch:
    """Makes an engine's steps, and overtakes them; one thread, and nothing blocks save ``receive``."""

    def __init__(self, schedule: Schedule, own: Source | None, ranks: int, facts: dict[str, str]) -> None:
        self._schedule, self._own, self._ranks = schedule, own, ranks
        self._channel, self._channels = SideChannel(), dict[Rank, ChannelAddress]()
        self._facts: dict[str, str] | None = facts  # what the workers have not heard of yet
        self._steps = 0
        self._fetched = 0  # the number of the next step's first fetch
        self._sent = 0  # how many of that step's fetches have gone ahead
        self._prefetches: list[str] = []  # those of that step's fetches that are prefetches
        self._revoked_in: int | None = None  # the last step with revocations
        self._begun: dict[Rank, int] = {}  # the last step with revocations that each rank has begun
        self._prepared: set[Source] = set()  # engines to which our workers have been told to make links

    # --- with a step -----------------------------------------------------------------------------------------------

    def identify(self, facts: dict[str, str]) -> None:
        """Have the workers told with the next step what all KV depends on from now on; no fetch overtakes that."""
        self._facts = facts

    def step(self, commands: StepCommands, renewals: tuple[TransferId, ...], copies: tuple[BlockCopy, ...]) -> Step:
        """Return the next step, which has these commands, renewals and copies."""
        first, self._sent = self._fetched, 0
        self._fetched += len(commands.fetches)
        prefetches, self._prefetches = tuple(self._prefetches), []
        facts, self._facts = self._facts, None
        self._steps += 1
        if commands.revokes:
            self._revoked_in = self._steps
        return Step(commands, renewals, facts, self._steps, first, prefetches, copies)

    def begun(self, steps: Mapping[Rank, int]) -> None:
        """Take in the last step with revocations that these ranks have begun."""
        self._begun |= steps

    # --- ahead of it -----------------------------------------------------------------------------------------------

    def listen_to(self, channels: Mapping[Rank, ChannelAddress]) -> None:
        """Take in where workers listen; once all have been said, fetches need not wait for a step."""
        before = len(self._channels)
        self._channels |= channels
        if len(self._channels) == self._ranks > before:
            self._channel.connect(self._channels)

    def prepare(self, source: Source) -> None:
        """Have the workers make their links to an engine from which they are to fetch, if it is the first time."""
        if source not in self._prepared and self._channel.open:
            if len(self._prepared) >= MOST_PREPARED:
                self._prepared.clear()
            self._prepared.add(source)
            self._channel.send(DirectFetches(self._fetched, prepare=((source, self._own),)))

    @property
    def direct(self) -> bool:
        """Whether fetches may overtake the steps: there is a way, and no worker has still to hear of a revocation.

        Blocks that were offered, and taken from others who may still read them, must not be written to before.
        """
        last = self._revoked_in
        heard = last is None or (len(self._begun) == self._ranks and min(self._begun.values()) >= last)
        return self._channel.open and self._facts is None and heard and not self._schedule.producer.revokes

    @property
    def next(self) -> int:
        """The number of the fetch that will be queued next."""
        return self._fetched + len(self._schedule.consumer.wanted)

    @property
    def last(self) -> tuple[int, Fetch]:
        """The number of the fetch that was queued last, and that fetch."""
        return self.next - 1, self._schedule.consumer.wanted[-1]

    def prefetch(self, request: str) -> None:
        """Take in that the fetch that was queued last is a prefetch for this request."""
        self._prefetches.append(request)

    def hurry(self) -> None:
        """Give the workers at once what they are to fetch, if that may overtake the steps."""
        fetches = self._schedule.consumer.wanted
        if len(fetches) > self._sent and self.direct:
            ahead = DirectFetches(self._fetched + self._sent, fetches[self._sent :], tuple(self._prefetches))
            self._channel.send(ahead)
            self._sent = len(fetches)

    def receive(self, timeout: float = 0.0) -> list[RankResult]:
        """Return what workers have said without a step, as soon as there is something, within so many seconds."""
        return self._channel.receive(timeout)

    def close(self) -> None:
        """Give up what does not go with a step; any number of times."""
        self._channel.close()
