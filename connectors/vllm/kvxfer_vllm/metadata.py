"""What crosses between vLLM's scheduler and worker processes for kvxfer, in the envelopes that vLLM asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.engine import ChannelAddress, Report, Step
from kvxfer.protocol.messages import RankDescriptor

__all__ = ["Handshake", "ReportMetadata", "StepMetadata"]


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to all workers, each step.

    vLLM takes the ends of transfers from its workers only, so that what the scheduler side finds out goes by way of them.

    Attributes:
        doomed: Requests whose load has failed though no worker knows it, and their blocks.
        freed: Requests whose blocks vLLM may free.
        partial: Requests whose load is here in part, and their blocks that are not.
        idle: The step computes nothing.
    """

    step: Step = field(default_factory=Step)
    doomed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    freed: tuple[str, ...] = ()
    partial: dict[str, tuple[int, ...]] = field(default_factory=dict)
    idle: bool = False


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: where the worker's agent listens, and its cache; and where its side channel does."""

    descriptor: RankDescriptor
    channel: ChannelAddress | None = None


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.merge(other.report))
