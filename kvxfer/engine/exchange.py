"""What crosses between an engine's scheduler and its workers: plain values, good for pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from kvxfer import arguments
from kvxfer.engine.side_channel import ChannelAddress, RankResult
from kvxfer.failures import Failure
from kvxfer.identity import Generation, TransferId
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.protocol.values import Stages
from kvxfer.schedule import StepCommands
from kvxfer.values import BlockTable, Rank

__all__ = ["BlockCopy", "Report", "Step"]

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class BlockCopy:
    """Blocks that a prefetch has filled, and those of the request that it was for; position by position.

    A block is copied where both tables have one.
    """

    request: str
    src: BlockTable
    dst: BlockTable


@dataclass(frozen=True)
class Step:
    """Scheduler to all workers, with each step of the engine.

    Attributes:
        commands: Offers, revocations, fetches and cancels.
        renewals: Offers whose consumers are alive though they have not come yet.
        facts: What all KV of the engine depends on from now on (``kvxfer.facts``), if that is news.
        number: Of the step; they count up.
        first: The number of the first of the fetches, some of which may have come by the side channel; None: none has.
        prefetches: Those of the fetches, by handle, that are prefetches.
        copies: What is to be copied before this step's forward pass.
    """

    commands: StepCommands = StepCommands()
    renewals: tuple[TransferId, ...] = ()
    facts: dict[str, str] | None = None
    number: int = 0
    first: int | None = None
    prefetches: tuple[str, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.commands or self.renewals or self.facts is not None or self.copies)


@dataclass(frozen=True)
class Report:
    """Workers to scheduler: what has ended on some ranks since they reported last. False if that is nothing.

    Attributes:
        descriptors: Where these ranks' agents listen; said once.
        released: For each transfer that was offered, the ranks that are done with it, and up to which generation.
        revoked: For each transfer that goes on though blocks of it were revoked, the ranks on which nothing reads these any
            more, and up to which generation.
        delivered: Requests whose load has been delivered to some ranks, and the generations that these were delivered.
        over: Requests whose load has ended, and the ranks on which it has.
        failed: Those whose load has failed, and why.
        arrived: Of loads that asked for it (``SchedulerSide.load``), the tokens that are here so far on each rank.
        payloads: Of requests that have been delivered, what the producer has sent along.
        short: Of requests that have been delivered, the token up to which they are here, where that is not all of it.
        writing: Those that are reported as failed though their blocks may still be written to, and on which ranks.
        quiet: Those of them that no longer are.
        stages: Of loads that have ended, when they came how far on each rank.
        invalid: The scheduler's blocks of loads that have failed.
        begun: The last step with revocations that these ranks have begun.
        channels: Where these ranks' side channels listen; said once.
        prefetched: What has become of prefetches; a later word counts more.
        copied: Requests whose prefetched blocks have been copied, and the seconds that each rank took for it.
    """

    descriptors: dict[Rank, RankDescriptor] = field(default_factory=dict)
    released: dict[TransferId, dict[Rank, Generation]] = field(default_factory=dict)
    revoked: dict[TransferId, dict[Rank, Generation]] = field(default_factory=dict)
    delivered: dict[str, set[Generation]] = field(default_factory=dict)
    over: dict[str, set[Rank]] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    arrived: dict[str, dict[Rank, int]] = field(default_factory=dict)
    payloads: dict[str, bytes] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)
    writing: dict[str, set[Rank]] = field(default_factory=dict)
    quiet: dict[str, set[Rank]] = field(default_factory=dict)
    stages: dict[str, dict[Rank, Stages]] = field(default_factory=dict)
    invalid: set[int] = field(default_factory=set)
    begun: dict[Rank, int] = field(default_factory=dict)
    channels: dict[Rank, ChannelAddress] = field(default_factory=dict)
    prefetched: dict[tuple[str, Rank], RankResult] = field(default_factory=dict)
    copied: dict[str, dict[Rank, float]] = field(default_factory=dict)

    def merge(self, later: Report) -> Report:
        """Return both reports as one; of one rank's two, ``later`` is the later one."""
        arguments.instance("later", later, Report)
        return Report(
            self.descriptors | later.descriptors,
            _join(self.released, later.released),
            _join(self.revoked, later.revoked),
            _union(self.delivered, later.delivered),
            _union(self.over, later.over),
            later.failed | self.failed,
            _join(self.arrived, later.arrived),
            later.payloads | self.payloads,
            later.short | {k: min(n, later.short.get(k, n)) for k, n in self.short.items()},
            _union(self.writing, later.writing),
            _union(self.quiet, later.quiet),
            _join(self.stages, later.stages),
            self.invalid | later.invalid,
            self.begun | later.begun,
            self.channels | later.channels,
            self.prefetched | later.prefetched,
            _join(self.copied, later.copied),
        )

    def __bool__(self) -> bool:
        ends = self.released or self.revoked or self.delivered or self.over or self.failed or self.quiet or self.arrived
        return bool(ends or self.descriptors or self.channels or self.begun or self.prefetched or self.copied)


def _join(a: dict[K, dict[Rank, T]], b: dict[K, dict[Rank, T]]) -> dict[K, dict[Rank, T]]:
    return {k: a.get(k, {}) | b.get(k, {}) for k in a.keys() | b.keys()}


def _union(a: dict[str, set[T]], b: dict[str, set[T]]) -> dict[str, set[T]]:
    return {k: a.get(k, set()) | b.get(k, set()) for k in a.keys() | b.keys()}
