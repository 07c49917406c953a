"""``KVXferConnector``: forwards each of vLLM's hooks to the scheduler's or the worker's part. It has no logic of its own.

The path of a load: ``get_num_new_matched_tokens`` and ``update_state_after_alloc`` (scheduler.py) queue a fetch;
``build_connector_meta`` sends it to the workers; ``start_load_kv`` (worker.py) gives it to the rank's agent
(kvxfer.control), which asks the producer and whose data thread moves the planned bytes. Its end comes with
``build_connector_worker_meta``, and ``update_connector_output`` (scheduler.py) tells vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    CopyBlocksOp,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

import kvxfer_vllm.internals as internals
from kvxfer_vllm.metadata import ReportMetadata, StepMetadata
from kvxfer_vllm.metrics import KVXferPromMetrics
from kvxfer_vllm.migration import translate
from kvxfer_vllm.scheduler import SchedulerHooks
from kvxfer_vllm.settings import (
    check_backend,
    check_enclosure,
    check_installed,
    groups_of,
    hits_may_differ,
    settings_of,
    share,
    wanted_layout,
)
from kvxfer_vllm.stats import KVXferStats
from kvxfer_vllm.worker import WorkerHooks

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KVXferConnector(KVConnectorBase_V1, SupportsHMA):
    """kvxfer as a vLLM connector; vLLM creates one in the scheduler process and one in each worker, which has the hooks of its role."""

    _cache_hit_source = internals.HIT_SOURCE
    _sched: SchedulerHooks
    _work: WorkerHooks

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        share()
        check_enclosure(vllm_config)
        config = settings_of(vllm_config, self._translate)
        groups = groups_of(kv_cache_config, vllm_config)
        self._loaded = tuple(g for g, group in enumerate(groups) if group.kind != "local")
        self._hits_may_differ = internals.loads_safely(vllm_config) and hits_may_differ(kv_cache_config)
        self._hooks: SchedulerHooks | WorkerHooks
        if role == KVConnectorRole.SCHEDULER:
            self._hooks = self._sched = SchedulerHooks(config, vllm_config, kv_cache_config)
        else:
            self._hooks = self._work = WorkerHooks(config, vllm_config, kv_cache_config)

    @classmethod
    def _translate(cls, extra: Mapping[str, Any], transfer: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Translate settings that were written for another connector; return kvxfer's settings, and notes for the log."""
        settings, notes = translate(extra, transfer)
        return settings, tuple(f"configuration of P2pNcclConnector: {note}" for note in notes)

    # --- scheduler -------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._sched.arrive(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._sched.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._sched.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._sched.step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._sched.update(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finish(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._sched.finish(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """Return the groups that a load restores; vLLM therefore does not zero their new blocks."""
        return self._loaded

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self._hits_may_differ

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._sched.bind_cache(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._sched.bind(gpu_block_pool)

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks will be free so soon that vLLM should wait for them rather than preempt (0.32 and later)."""
        return self._sched.frees.soon()

    def has_pending_push_work(self) -> bool:
        return self._sched.waiting

    def reset_cache(self) -> bool:
        """Record that vLLM drops its caches (with ``reset_connector``), as around a change of weights."""
        return self._sched.reset()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._sched.publish(metadata)

    # --- worker ----------------------------------------------------------------------------------------------------

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._work.register(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        self._work.copy_with(copy_operation)

    def unregister_kv_caches(self) -> None:
        """Release the cache, which vLLM is about to unmap (0.33 and later)."""
        self._work.suspend()

    def restore_kv_caches(self) -> None:
        self._work.resume()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return None inside another connector, which would pass it to siblings of this one; then the first report carries it."""
        return self._work.handshake() if internals.stands_alone(self) else None

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._work.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._work.load(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what a step needs has arrived before its forward pass, and it does not need loads that still run."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Offer the layers so far if a consumer waits for them. vLLM does not call this in CUDA graphs that include attention."""
        self._work.layer_done(self._step, layer_name)

    def wait_for_save(self) -> None:
        """Make the step's offers; this is the last hook after the forward pass and drafting. Waits for nothing."""
        self._work.after_forward(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Say what the scheduler's side has found out, and vLLM takes from workers only (``StepMetadata``)."""
        step = self._step
        self._work.collect(step)
        return KVConnectorTransferResults(set(step.freed), {*step.failed, *step.partial}, set(step.failed))

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that partial loads have not filled. Loads that failed are reported by request."""
        return set().union(*self._step.partial.values())

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        return self._work.report()

    def get_kv_connector_stats(self) -> KVXferStats | None:
        return self._hooks.stats()

    # --- both ------------------------------------------------------------------------------------------------------

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        self._hooks.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Return the layout that suits transfers best (``wanted_layout``); None if vLLM is to choose. vLLM asks before it loads weights.

        Any layout will do, and the engines may differ in it.

        Raises:
            ConfigError: The back end of the settings is not installed, which is better said now than once the weights are loaded.
        """
        settings = check_backend(vllm_config.kv_transfer_config, cls._translate)
        return wanted_layout(vllm_config) if settings.get("blocks_outermost", True) is True else None

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Return whether this vLLM announces when it unmaps the cache's memory and when it maps it again."""
        return internals.FOLLOWS_SLEEP

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False. vLLM asks in the process that reads its arguments.

        Raises:
            ConfigError: As of ``get_required_kvcache_layout``.
        """
        check_installed((extra_config or {}).get("backend"))
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVXferStats | None:
        return KVXferStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> KVXferPromMetrics:
        return KVXferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# MultiConnector finds what rebuilds statistics by name alone, also where VLLM_PLUGINS leaves kvxfer's plug-in out.
internals.register_connector("KVXferConnector", "kvxfer_vllm.connector")
