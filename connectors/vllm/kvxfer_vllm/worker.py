"""A worker's part: turns vLLM's worker hooks into calls of ``kvxfer.engine.WorkerSide``, and reports to vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.engine import Report, WorkerChannel, WorkerSide
from kvxfer.geometry import Cache
from kvxfer.logs import logger
from kvxfer.values import BlockTable
from kvxfer_vllm.content.adapters import LoadedAdapters
from kvxfer_vllm.copying import BlockCopier, Clearing
from kvxfer_vllm.host_buffers import CopyBlocks, HostBuffers
from kvxfer_vllm.internals import ask_for_tile_registers
from kvxfer_vllm.layout import Layout, rank_of, replicated_ranks
from kvxfer_vllm.layout_check import check_layout
from kvxfer_vllm.metadata import Handshake, ReportMetadata, StepMetadata
from kvxfer_vllm.stats import KVXferStats, RankStats

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logger("kvxfer.vllm")

DRAIN_S = 2.0
"""Seconds that consumers have to finish fetching once vLLM ends its workers: it kills workers after four seconds. With
``--shutdown-timeout`` vLLM keeps running until offers are fetched, and only then ends its workers."""


IDLE_S = 0.002
"""For how long a step that computes nothing waits for something to end."""


class WorkerHooks:
    """One rank. All methods run on the worker's main thread."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        self._config, self._vllm, self._kv = config, vllm_config, kv_cache_config
        self._side: WorkerSide | None = None
        self._buffers: HostBuffers | None = None
        self._clearing: Clearing | None = None
        self._adapters = LoadedAdapters(getattr(vllm_config, "lora_config", None))
        self._report = Report()
        self._idle = self._told = False  # of the last step: whether it computed nothing, and whether a load was over
        self._stats = RankStats()
        self._asleep = False
        # Of a step in two halves, each calls the hook of a layer when its own half is written.
        self._halved = bool(getattr(vllm_config.parallel_config, "use_ubatching", False))
        self._offered: StepMetadata | None = None  # the step whose offers were made last

    def register(self, tensors: dict[str, torch.Tensor]) -> None:
        """Describe the cache, which is allocated, and start the agent."""
        from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tensor_model_parallel_rank

        spread = getattr(self._vllm.parallel_config, "prefill_context_parallel_size", 1) > 1
        across = get_pcp_group().rank_in_group if spread else 0
        rank = rank_of(self._vllm, get_pp_group().rank_in_group, across, get_tensor_model_parallel_rank())
        layout = Layout.of(tensors, self._kv, self._vllm, rank)
        if layout.cache.regions[0].device == "cpu":
            ask_for_tile_registers()
        if self._config.layout_check:
            check_layout(layout.cache, tensors, self._vllm)
        if getattr(self._kv, "needs_kv_cache_zeroing", False):
            self._clearing = Clearing(tensors.values(), layout.cache)
        copy = BlockCopier(tensors.values(), layout.cache).copy
        transfer = self._vllm.kv_transfer_config
        cache = layout.cache
        if transfer is not None and transfer.kv_buffer_device == "cpu" and cache.regions[0].device != "cpu":
            log.info("KV goes through buffers in host memory, because kv_buffer_device is cpu")
            self._buffers = HostBuffers(tensors)
            cache = self._buffers.cover(cache)
        self.start(self._agent(cache), layout, copy=copy, channel=WorkerChannel)

    def copy_with(self, copy: CopyBlocks) -> None:
        """Take vLLM's operation that copies blocks to host memory and back. Used only if ``kv_buffer_device`` asks for it."""
        if self._buffers is not None:
            self._buffers.use(copy)

    def _agent(self, cache: Cache) -> Agent:
        transfer = self._vllm.kv_transfer_config
        return Agent(cache, self._config, str(transfer.engine_id if transfer else ""))

    def start(
        self,
        agent: Agent,
        layout: Layout,
        *,
        copy: Callable[[BlockTable, BlockTable], None],
        channel: Callable[..., WorkerChannel] | None = None,
    ) -> None:
        """Take up work with this agent, whose cache is laid out so; for the rest see ``WorkerSide``."""
        self._side = WorkerSide(
            agent,
            table=layout.table,
            before_load=None if self._clearing is None else self._clearing.before,
            on_ended=self._stats.record,
            # Of an elastic cache the scheduler side alone knows how much could be held besides what requests have.
            quarantine=self._kv.num_blocks // 4 if not agent.cache.elastic else 0,
            copy=copy,
            channel=channel,
        )

    def suspend(self) -> None:
        """Let go of the cache before vLLM unmaps it, for sleep mode.

        Raises:
            KvxferError: It must stay.
        """
        if not self._asleep:
            self._on.suspend()
            self._asleep = True
            log.info("the cache is released for sleep mode: this rank's transfers and links have ended")

    def resume(self) -> None:
        """Take the cache up again, which has other memory now."""
        if self._asleep:
            self._stats.look(self._on.agent, last=True)
            self._on.resume(self._agent(self._on.agent.cache))
            self._asleep = False
            log.info("the cache is mapped again, and this rank can transfer")

    @property
    def _on(self) -> WorkerSide:
        assert self._side is not None, "register_kv_caches was not called"
        return self._side

    @property
    def _drafts(self) -> bool:
        """Whether this rank may write KV of drafts after it has been asked for results.

        Only the last stage of a pipeline drafts. If it does, model runner 1 calls ``wait_for_save`` there alone.
        """
        stages: int = self._vllm.parallel_config.pipeline_parallel_size
        return self._on.agent.cache.rank.pp == stages - 1

    @property
    def _rank(self) -> int:
        rank: int = self._vllm.parallel_config.rank
        return rank

    def handshake(self) -> Handshake | None:
        """Return where the agent listens; None before there is one, or if only the first report says it."""
        if self._side is None or replicated_ranks(self._vllm):
            return None
        return Handshake(self._side.agent.descriptor, self._side.address)

    def before_forward(self, metadata: StepMetadata) -> None:
        """Apply what must be known before this step can reuse a block."""
        self._adapters.heard(metadata.adapters.get(self._rank, 0))
        self._on.begin(metadata.step)

    def load(self, metadata: StepMetadata) -> None:
        """Begin this step's loads, and end those that are no longer wanted.

        Called before the forward pass, and behind vLLM's clearing of new blocks, if a request counts on a prefetch.
        """
        self._on.load(metadata.step)

    def layer_done(self, metadata: StepMetadata, layer: str) -> None:
        """Record that this step's KV of a layer is written, as far as the device has been told."""
        if not self._halved and not self._adapters.replaced:
            self._on.layer_done(metadata.step, layer)

    def after_forward(self, metadata: StepMetadata) -> None:
        """Offer what this step has computed, once."""
        if metadata is not self._offered:
            self._offered = metadata
            if self._adapters.replaced:
                self._on.refuse(metadata.step, "vLLM has loaded an adapter again, whose files have changed")
            else:
                self._on.after_forward(metadata.step)

    def collect(self, metadata: StepMetadata) -> None:
        """Process what has ended since the last step.

        While nothing is computed vLLM makes an empty step every millisecond, each half a millisecond of Python in which the threads
        that move KV cannot run. So an empty step waits for something to end, but not longer than a new request can wait. With
        asynchronous scheduling vLLM reads a step's report only after the next step, so one that follows such a report does not wait.
        """
        if not self._drafts:
            self.after_forward(metadata)
        self._idle = metadata.idle
        report = self._on.collect(IDLE_S if metadata.idle and not (metadata.waited or self._told) else 0.0)
        self._told = bool(report.results)
        self._report = self._report.merge(report)

    def report(self) -> ReportMetadata | None:
        """Return what the scheduler side must know; None if that is nothing.

        Of a step that computes nothing there is always a report. Otherwise vLLM would not call the scheduler side, which may have
        heard by the side channel that a load is here.
        """
        out, self._report = self._report, Report()
        loaded = self._adapters.report()
        gauges = self._stats.take_gauges()
        if not out and not loaded and not gauges and not self._idle:
            return None
        return ReportMetadata(out, {self._rank: (self._adapters.replacements, loaded)} if loaded else {}, gauges)

    def stats(self) -> KVXferStats | None:
        """Return what has been counted since the last call; None if that is nothing."""
        if self._side is not None:
            self._stats.look(self._side.agent)
        return self._stats.take()

    def close(self) -> None:
        """Close the agent, once consumers have what they are about to fetch, or soon."""
        if self._side is not None:
            self._side.drain(DRAIN_S)

    def __len__(self) -> int:
        """Return how much is remembered of loads, and of what is still to be reported; 0 when there is nothing."""
        return bool(self._report) + (0 if self._side is None else len(self._side))
