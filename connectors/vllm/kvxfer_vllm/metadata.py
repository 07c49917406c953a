"""What kvxfer sends between vLLM's scheduler and worker processes, in the classes that vLLM requires."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvxfer.engine import ChannelAddress, Report, Step
from kvxfer.protocol.messages import RankDescriptor


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Sent from the scheduler to all workers in each step.

    How a load has ended, the scheduler's side finds out, for all ranks at once. Three things vLLM takes from workers only, so they say
    them with their next results: ``freed``, ``failed`` and ``partial``.
    """

    step: Step = field(default_factory=Step)
    freed: tuple[str, ...] = ()  # requests whose blocks vLLM may free
    failed: tuple[str, ...] = ()  # requests whose load has failed, about which vLLM is to do what its policy says
    # requests of which a part was loaded, and their blocks that were not
    partial: dict[str, tuple[int, ...]] = field(default_factory=dict)
    idle: bool = False  # whether the step computes nothing
    waited: bool = False  # whether the scheduler side has waited for loads in this step, so that workers need not
    # by rank, of how many replacements of adapters the scheduler knows. What a step computes with others is not offered
    adapters: dict[int, int] = field(default_factory=dict)

    @property
    def silent(self) -> bool:
        """Whether workers have nothing to say to vLLM for it."""
        return not (self.freed or self.failed or self.partial)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """Sent from worker to scheduler once: the agent's descriptor (address and cache), and the side channel's address."""

    descriptor: RankDescriptor
    channel: ChannelAddress | None = None


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Sent from workers to the scheduler after each step, if there is anything to report."""

    report: Report
    # for each rank that has loaded adapters, how often it has replaced one, and the hashes of all of them by number
    adapters: dict[int, tuple[int, dict[int, str]]] = field(default_factory=dict)
    # the gauges of each rank where one has changed (``stats.Gauges``)
    gauges: dict[str, dict[str, Any]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, ReportMetadata)
        adapters, gauges = {**self.adapters, **other.adapters}, {**self.gauges, **other.gauges}
        return ReportMetadata(self.report.merge(other.report), adapters, gauges)
