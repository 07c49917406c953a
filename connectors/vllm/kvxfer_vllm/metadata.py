"""What crosses between vLLM's scheduler and worker processes for kvxfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.geometry import Rank
from kvxfer.identity import Generation, TransferId
from kvxfer.schedule import StepCommands
from kvxfer.session import Member

__all__ = ["Handshake", "Report", "Step"]

T = TypeVar("T")


@dataclass
class Step(KVConnectorMetadata):
    """Scheduler to all workers, each step. ``doomed``: requests
    whose load failed before it began, and their blocks. ``freed``: requests whose blocks vLLM may free, which it takes
    from its workers only. ``facts``: what all KV of the engine depends on from now on, if that is news."""

    commands: StepCommands = field(default_factory=StepCommands)
    doomed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    renewals: tuple[TransferId, ...] = ()
    freed: tuple[str, ...] = ()
    facts: dict[str, str] | None = None


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: where the worker's agent listens, and its cache."""

    member: Member


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Workers to scheduler.

    released: for each transfer that was offered, the ranks that are done with it, and up to which generation.
    moving: requests whose load is reported as failed, and the ranks on which their blocks may still be written to.
    still: those of them on which they no longer are.
    delivered: requests whose load has been delivered to some ranks, and the generations that these were delivered.
    members: where the ranks' agents listen, once.
    """

    released: dict[TransferId, dict[Rank, int]] = field(default_factory=dict)
    moving: dict[str, set[Rank]] = field(default_factory=dict)
    still: dict[str, set[Rank]] = field(default_factory=dict)
    delivered: dict[str, set[Generation]] = field(default_factory=dict)
    members: dict[Rank, Member] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        keys = self.released.keys() | other.released.keys()
        return Report(
            {k: self.released.get(k, {}) | other.released.get(k, {}) for k in keys},
            _union(self.moving, other.moving),
            _union(self.still, other.still),
            _union(self.delivered, other.delivered),
            self.members | other.members,
        )

    def __bool__(self) -> bool:
        return bool(self.released or self.moving or self.still or self.delivered or self.members)


def _union(a: dict[str, set[T]], b: dict[str, set[T]]) -> dict[str, set[T]]:
    return {k: a.get(k, set()) | b.get(k, set()) for k in a.keys() | b.keys()}
