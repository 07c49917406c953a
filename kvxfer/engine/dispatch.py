"""What goes to the workers: a step's commands with the step, and fetches ahead of it where that is safe.

A fetch that went ahead comes again with its step. A worker recognises it by its number.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer import clock
from kvxfer.engine.exchange import BlockCopy, Step
from kvxfer.engine.side_channel import ChannelAddress, DirectFetches, SideChannel
from kvxfer.identity import Source, TransferId
from kvxfer.schedule import Schedule, StepCommands
from kvxfer.values import Rank

MAX_PREPARED = 1024
"""The most engines that are remembered as having been prepared (``Dispatch.prepare``)."""


class Dispatch:
    """Makes an engine's steps, and sends fetches ahead of them. One thread.

    Attributes:
        channel: What workers of this host send ahead of a step.
        told: Whether workers know all that the last step says: nothing, or fetches that have gone ahead.
    """

    def __init__(self, schedule: Schedule, own: Source | None, ranks: int, facts: dict[str, str]) -> None:
        self._schedule, self._own, self._ranks = schedule, own, ranks
        self.channel, self._channels = SideChannel(), dict[Rank, ChannelAddress]()
        self.told = False
        self._facts: dict[str, str] | None = facts  # what the workers have not heard of yet
        self._steps = 0
        self._sent = 0  # how many of the next step's fetches have gone ahead
        self._sent_at = 0.0
        self._lost = False  # whether some worker may not have got one of them
        self._revoked_in: int | None = None  # the last step with revocations
        self._begun: dict[Rank, int] = {}  # the last step with revocations that each rank has begun
        self._prepared: set[Source] = set()  # engines to which our workers have been told to make links

    # --- with a step -----------------------------------------------------------------------------------------------

    def identify(self, facts: dict[str, str]) -> None:
        """State with the next step what all KV depends on from now on; no fetch overtakes that step."""
        self._facts = facts

    def step(self, commands: StepCommands, renewals: tuple[TransferId, ...], copies: tuple[BlockCopy, ...]) -> Step:
        """Return the next step, with these commands, renewals and copies."""
        ahead = self._sent >= len(commands.fetches) and not self._lost
        self._sent = 0
        facts, self._facts = self._facts, None
        self._steps += 1
        if commands.revokes:
            self._revoked_in = self._steps
        news = commands.offers or commands.revokes or commands.cancels or renewals or copies or facts is not None
        self.told, self._lost = ahead and not news, False
        return Step(commands, renewals, facts, self._steps, copies)

    def begun(self, steps: Mapping[Rank, int]) -> None:
        """Record the last step with revocations that these ranks have begun."""
        self._begun |= steps

    # --- ahead of it -----------------------------------------------------------------------------------------------

    def listen_to(self, channels: Mapping[Rank, ChannelAddress]) -> None:
        """Record where workers listen; once all are known, fetches need not wait for a step."""
        before = len(self._channels)
        self._channels |= channels
        if len(self._channels) == self._ranks > before:
            self.channel.connect(self._channels)

    def prepare(self, source: Source) -> None:
        """Tell the workers to make their links to a source when it is first named."""
        if source not in self._prepared and self.channel.open:
            if len(self._prepared) >= MAX_PREPARED:
                self._prepared.clear()
            self._prepared.add(source)
            self.channel.send(DirectFetches(prepare=((source, self._own),)))

    @property
    def direct(self) -> bool:
        """Whether fetches may overtake the steps: there is a side channel, and every worker knows of all revocations.

        A fetch may write into blocks that were offered before and revoked since; a worker must revoke them first.
        """
        last = self._revoked_in
        heard = last is None or (len(self._begun) == self._ranks and min(self._begun.values()) >= last)
        return self.channel.open and self._facts is None and heard and not self._schedule.producer.revokes

    def send_ahead(self, apart: float = 0.0) -> None:
        """Send the workers at once what they are to fetch, if that may overtake the steps and the last message is ``apart`` seconds old."""
        fetches = self._schedule.consumer.fetches
        if len(fetches) > self._sent and self.direct and clock.now() >= self._sent_at + apart:
            self._sent_at = clock.now()
            self._lost |= not self.channel.send(DirectFetches(tuple(fetches[self._sent :])))
            self._sent = len(fetches)
