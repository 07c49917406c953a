"""What crosses between vLLM's scheduler and worker processes for kvxfer."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.geometry import Rank
from kvxfer.identity import TransferId
from kvxfer.schedule import StepCommands
from kvxfer.session import Member

__all__ = ["Handshake", "Report", "Step"]


@dataclass
class Step(KVConnectorMetadata):
    """Scheduler to all workers, each step. ``loads``: the vLLM request that each want belongs to. ``doomed``: requests
    whose load failed before it began."""

    commands: StepCommands = field(default_factory=StepCommands)
    loads: dict[TransferId, str] = field(default_factory=dict)
    doomed: tuple[str, ...] = ()
    renewals: tuple[TransferId, ...] = ()


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: where the worker's agent listens, and its cache."""

    member: Member


@dataclass
class Report(KVConnectorWorkerMetadata):
    """Workers to scheduler: for each transfer that was offered, the ranks that are done with it, and up to which
    generation."""

    released: dict[TransferId, dict[Rank, int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Report)
        keys = self.released.keys() | other.released.keys()
        return Report({k: self.released.get(k, {}) | other.released.get(k, {}) for k in keys})
