"""What crosses between an engine's scheduler and its workers: plain values, good for pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from kvxfer.failures import Failure
from kvxfer.identity import Generation, TransferId
from kvxfer.protocol.messages import RankDescriptor
from kvxfer.schedule import StepCommands
from kvxfer.values import Rank

__all__ = ["Report", "Step"]

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """Scheduler to all workers, with each step of the engine.

    Attributes:
        commands: offers, revocations, fetches and cancels.
        renewals: offers whose consumers are alive though they have not come yet.
        facts: what all KV of the engine depends on from now on (``kvxfer.facts``), if that is news.
    """

    commands: StepCommands = StepCommands()
    renewals: tuple[TransferId, ...] = ()
    facts: dict[str, str] | None = None

    def __bool__(self) -> bool:
        return bool(self.commands or self.renewals or self.facts is not None)


@dataclass(frozen=True)
class Report:
    """Workers to scheduler: what has ended on some ranks since they reported last. False if that is nothing.

    Attributes:
        members: where these ranks' agents listen; said once.
        released: for each transfer that was offered, the ranks that are done with it, and up to which generation.
        delivered: requests whose load has been delivered to some ranks, and the generations that these were delivered.
        over: requests whose load has ended, and the ranks on which it has.
        failed: those whose load has failed, and why.
        writing: those that are reported as failed though their blocks may still be written to, and on which ranks.
        quiet: those of them that no longer are.
    """

    members: dict[Rank, RankDescriptor] = field(default_factory=dict)
    released: dict[TransferId, dict[Rank, Generation]] = field(default_factory=dict)
    delivered: dict[str, set[Generation]] = field(default_factory=dict)
    over: dict[str, set[Rank]] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)
    writing: dict[str, set[Rank]] = field(default_factory=dict)
    quiet: dict[str, set[Rank]] = field(default_factory=dict)

    def merge(self, later: Report) -> Report:
        """Return both reports as one; of one rank's two, ``later`` is the later one."""
        released = self.released.keys() | later.released.keys()
        return Report(
            self.members | later.members,
            {k: self.released.get(k, {}) | later.released.get(k, {}) for k in released},
            _union(self.delivered, later.delivered),
            _union(self.over, later.over),
            later.failed | self.failed,
            _union(self.writing, later.writing),
            _union(self.quiet, later.quiet),
        )

    def __bool__(self) -> bool:
        return bool(self.members or self.released or self.delivered or self.over or self.failed or self.quiet)


def _union(a: dict[str, set[T]], b: dict[str, set[T]]) -> dict[str, set[T]]:
    return {k: a.get(k, set()) | b.get(k, set()) for k in a.keys() | b.keys()}
