"""What an engine's scheduler and its workers send each other: plain values that can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvxfer import arguments
from kvxfer.engine.side_channel import ChannelAddress
from kvxfer.identity import Generation, TransferId
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.schedule import RankResult, StepCommands
from kvxfer.values import BlockTable, OfferEnd, Rank


@dataclass(frozen=True)
class BlockCopy:
    """The blocks that a prefetch has filled (``src``), and those of the request that it was for (``dst``).

    The block at a position is copied if both tables have one there. ``number``: that of the fetch.
    """

    number: int
    src: BlockTable
    dst: BlockTable


@dataclass(frozen=True)
class Step:
    """What the scheduler sends to all workers with each step of the engine.

    Attributes:
        commands: Offers, revocations, fetches and cancels.
        renewals: Offers whose consumers still wait to fetch them, so that their leases are renewed.
        facts: What all KV of the engine depends on from now on (``kvxfer.facts``); None if unchanged.
        number: The number of the step; steps count up.
        copies: What is to be copied before this step's forward pass.
    """

    commands: StepCommands = StepCommands()
    renewals: tuple[TransferId, ...] = ()
    facts: dict[str, str] | None = None
    number: int = 0
    copies: tuple[BlockCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.commands or self.renewals or self.facts is not None or self.copies)


@dataclass(frozen=True)
class Report:
    """What workers tell the scheduler: what has ended on some ranks since their last report. False if nothing has.

    Attributes:
        descriptors: Where these ranks' agents listen; reported once.
        released: For each transfer that was offered, the ranks that are done with it, and up to which generation.
        revoked: For each transfer that goes on although blocks of it were revoked, the ranks on which nothing reads these
            blocks any more, and up to which generation.
        results: How loads have ended, by the number of the fetch and the rank; a later one replaces an earlier one.
        begun: For each rank, the last step with revocations that it has begun.
        channels: Where these ranks' side channels listen; reported once.
        offers_ended: How offers have ended on each rank.
        copied: For prefetches that have been copied, by the number of the fetch, the seconds that each rank took.
    """

    descriptors: dict[Rank, RankDescriptor] = field(default_factory=dict)
    released: dict[TransferId, dict[Rank, Generation]] = field(default_factory=dict)
    revoked: dict[TransferId, dict[Rank, Generation]] = field(default_factory=dict)
    results: dict[tuple[int, Rank], RankResult] = field(default_factory=dict)
    begun: dict[Rank, int] = field(default_factory=dict)
    channels: dict[Rank, ChannelAddress] = field(default_factory=dict)
    copied: dict[int, dict[Rank, float]] = field(default_factory=dict)
    offers_ended: dict[TransferId, dict[Rank, OfferEnd]] = field(default_factory=dict)

    def merge(self, later: Report) -> Report:
        """Return both reports as one. If both have a report of the same rank, that in ``later`` must be the later one."""
        arguments.instance("later", later, Report)
        return Report(**{name: _merged(news, getattr(later, name)) for name, news in vars(self).items()})

    def __bool__(self) -> bool:
        return any(vars(self).values())


def _merged(a: Any, b: Any) -> Any:
    """Return both as one: dicts key by key, and of anything else the second."""
    if isinstance(a, dict):
        return {**a, **{k: _merged(a[k], v) if k in a else v for k, v in b.items()}}
    return b
