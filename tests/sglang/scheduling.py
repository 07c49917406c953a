"""SGLang's own scheduler with played forward passes: its queues, pools, prefix tree and metadata, and its wiring of them.

It is made without SGLang's engine: what `Scheduler.__init__` would take from a model runner is given here. KV is a function of
the prompt, so that whoever decodes can tell whether it has the right one.

Needs `overlay.install` before it is imported.
"""

from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache, match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from tests.sglang.played import PAGE

__all__ = ["DecodePlay", "PrefillPlay"]

CONTEXT, SLOTS = 512, 6
WINDOW = 2 * PAGE + 3
"""Tokens that a layer with a sliding window attends to."""


class _Played(Scheduler):
    """What the schedulers of both kinds share.

    Args:
        pool: SGLang's KV pool.
        server_args: SGLang's arguments of the server.
        slots: SGLang's table of what tokens of which request lie where.
    """

    def __init__(self, pool: Any, server_args: Any, slots: Any) -> None:
        self.server_args, self.req_to_token_pool = server_args, slots
        self.model_config = runtime_context.process_model_config()
        size = pool.size
        self.windows = isinstance(pool, SWAKVPool)
        if self.windows:
            self.sliding_window_size = WINDOW
            self.token_to_kv_pool_allocator = SWATokenToKVPoolAllocator(
                size, pool.size_swa, pool.page_size, pool.dtype, "cpu", pool, need_sort=False
            )
        else:
            self.token_to_kv_pool_allocator = PagedTokenToKVPoolAllocator(
                size, pool.page_size, pool.dtype, "cpu", pool, need_sort=False
            )
        params = CacheInitParams(False, slots, self.token_to_kv_pool_allocator, page_size=pool.page_size)
        if self.windows:
            params.sliding_window_size, params.tree_components = WINDOW, (ComponentType.FULL, ComponentType.SWA)
        self.tree_cache = UnifiedRadixCache(params) if self.windows else RadixCache(params)
        runner = SimpleNamespace(
            effective_logical_max_total_num_tokens=size, kv_cache_dtype_str="bfloat16", max_token_pool_size=size
        )
        self.tp_worker = SimpleNamespace(model_runner=runner, is_hybrid_swa=self.windows)
        self.spec_algorithm = SpeculativeAlgorithm.NONE
        self.draft_worker = self.rust_server = self.scheduler_stage_metrics = self.last_batch = None
        self.max_total_num_tokens, self.max_running_requests, self.kv_shard_widening = size, SLOTS, 1
        self.enable_hisparse = self.enable_decode_hicache = self.enable_lora = self.enable_overlap = False
        self.enable_priority_scheduling = self.enable_unified_memory = self.enable_staging = False
        self.random_seed, self.processed_tokens_counter = 0, 0
        self.waiting_queue: list[Req] = []
        self.running_batch = SimpleNamespace(reqs=[])
        # Where outputs and measurements go, and queues of what is not played.
        self.output_streamer, self.batch_result_processor = MagicMock(), MagicMock()
        self.grammar_manager, self.dllm_manager, self.ipc_channels = MagicMock(), MagicMock(), MagicMock()
        self.dllm_manager.pop_aborted_reqs.return_value = []
        self.metrics_reporter = MagicMock(enable_metrics=False)
        group = runtime_context.get_parallel().attn_tp_group.cpu_group
        self.attn_tp_cpu_group, self.attn_cp_cpu_group = group, group  # the least of all is the least again
        self.chunked_req = self._pending_chunked_abort_req = self.dllm_config = None
        self.enable_continuous_input_polling = False
        self.init_disaggregation()
        self.reqs: dict[int, Req] = {}

    def request(self, tokens: list[int], room: int, shared: int | None = None) -> Req:
        """Return SGLang's record of a request; its room is ``shared`` if the router has given another one the same."""
        from sglang.srt.disaggregation.utils import DisaggregationMode

        self.reqs[room] = Req(
            str(room),
            "",
            array("q", tokens),
            SamplingParams(max_new_tokens=8),
            bootstrap_host="127.0.0.1",
            bootstrap_port=runtime_context.get_disagg().disaggregation_bootstrap_port,
            bootstrap_room=room if shared is None else shared,
            disagg_mode=DisaggregationMode(runtime_context.get_disagg().disaggregation_mode),
            vocab_size=512,
        )
        return self.reqs[room]

    def abort(self, room: int) -> None:
        """Have a client abort a request."""
        self.abort_request(AbortReq(rid=str(room)))

    def state(self, room: int) -> str:
        """Return what has become of a request: `running`, `done`, or why it was aborted."""
        req = self.reqs[room]
        reason = req.finished_reason
        if reason is None:
            return "running"
        return str(getattr(reason, "message", "") or "done")

    def slots(self, room: int, past: int) -> torch.Tensor:
        """Return where a request's tokens up to one lie."""
        return self.req_to_token_pool.req_to_token[self.reqs[room].kv.req_pool_idx, :past].long()

    def expected(self, tokens: list[int], heads: slice) -> list[torch.Tensor]:
        """Return the KV of a prompt, [token, head, dim] for each buffer, of these of the model's heads."""
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        total = self.model_config.get_total_num_kv_heads()
        made = []
        for buffer in range(2 * pool.layer_num):  # those of windows behind the others
            table = torch.randn((512, total, pool.head_dim), generator=torch.Generator().manual_seed(buffer))
            # Of what came before a token, too, as in a model.
            made.append(torch.cumsum(table[torch.tensor(tokens)], 0).to(pool.dtype)[:, heads])
        return made

    def buffers(self, at: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return all buffers, each with where these tokens lie in it."""
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        if not self.windows:
            return [(buffer, at) for buffer in pool.k_buffer + pool.v_buffer]
        full, window = pool.full_kv_pool, pool.swa_kv_pool
        inside = self.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(at)
        return [(buffer, at) for buffer in full.k_buffer + full.v_buffer] + [
            (buffer, inside) for buffer in window.k_buffer + window.v_buffer
        ]

    def heads(self) -> slice:
        """Return which of the model's heads are this rank's."""
        here = self.token_to_kv_pool_allocator.get_kvcache().head_num
        rank = runtime_context.get_parallel().attn_tp_rank
        return slice(rank * here, (rank + 1) * here)

    def free(self) -> int:
        """Return for how many tokens there is room, cached ones that may be evicted included."""
        if self.windows:
            return int(self.token_to_kv_pool_allocator.full_available_size() + self.tree_cache.full_evictable_size())
        return int(self.token_to_kv_pool_allocator.available_size() + self.tree_cache.evictable_size())


class PrefillPlay(_Played):
    """A scheduler that prefills in chunks, one request at a time."""

    def __init__(self, pool: Any, server_args: Any, chunk: int) -> None:
        super().__init__(pool, server_args, ReqToTokenPool(SLOTS, CONTEXT, "cpu", enable_memory_saver=False))
        self.chunk = chunk

    def submit(self, tokens: list[int], room: int, shared: int | None = None) -> None:
        """Take a request in."""
        heads = self.model_config.get_num_kv_heads(1)
        self.disagg_prefill_bootstrap_queue.add(self.request(tokens, room, shared), heads)

    def turn(self) -> None:
        """Make a turn of SGLang's loop."""
        self.waiting_queue.extend(self.disagg_prefill_bootstrap_queue.pop_bootstrapped())
        self.process_pending_chunked_abort()
        self.resolve_waiting_queue_bootstrap()
        if self.chunked_req is None and self.waiting_queue:
            self.chunked_req = self.waiting_queue.pop(0)
            self._admit(self.chunked_req)
        if self.chunked_req is not None:
            self._run(self.chunked_req)
        self.process_disagg_prefill_inflight_queue()

    def _admit(self, req: Req) -> None:
        """Begin with what the prefix tree has of a request, of which the last token is computed anew."""
        found = match_kv_cache(req, self.tree_cache, req.origin_input_ids[:-1])
        req.lock = self.tree_cache.lock(found.last_device_node)
        there = self.tree_cache.prefix_device_indices(req)
        self.req_to_token_pool.alloc([req])
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(0, len(there))), there)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.kv.cache_protected_len = req.extend_end = len(there)
        req.full_untruncated_fill_ids = req.origin_input_ids

    def _run(self, req: Req) -> None:
        """Play the forward pass of a request's next chunk, and send it."""
        tokens, first = list(req.origin_input_ids), req.extend_end
        past = min(len(tokens), first + self.chunk)
        last = self.slots(int(req.rid), first)[-1:] if first else torch.tensor([-1])
        evict_from_tree_cache(self.tree_cache, past - first + 2 * PAGE)
        span = torch.tensor([first]), torch.tensor([first]), torch.tensor([past]), torch.tensor([past])
        at = self.token_to_kv_pool_allocator.alloc_extend(*span, last, past - first)
        self.req_to_token_pool.write((req.kv.req_pool_idx, slice(first, past)), at)
        req.kv.kv_allocated_len = past
        for (buffer, places), made in zip(self.buffers(at), self.expected(tokens, self.heads()), strict=True):
            buffer[places] = made[first:past]
        req.extend_end = req.kv.kv_committed_len = past
        if past < len(tokens):
            self.send_kv_chunk(req)
            return
        self.chunked_req = None
        req.output_ids.append(sum(tokens) % 512)
        self.checkpoint_disagg_prefill(req)
        self.disagg_prefill_inflight_queue.append(req)
        self.send_kv_chunk(req, last_chunk=True)


class DecodePlay(_Played):
    """A scheduler that lets requests decode whose KV has come."""

    def __init__(self, pool: Any, server_args: Any) -> None:
        slots = DecodeReqToTokenPool(SLOTS, CONTEXT, "cpu", enable_memory_saver=False, pre_alloc_size=SLOTS)
        super().__init__(pool, server_args, slots)

    def submit(self, tokens: list[int], room: int, shared: int | None = None) -> None:
        """Take a request in."""
        self.disagg_decode_prealloc_queue.add(self.request(tokens, room, shared))

    def turn(self) -> list[int]:
        """Make a turn of SGLang's loop; return the rooms whose requests may decode from now on."""
        self.process_decode_queue()
        ready, self.waiting_queue = self.waiting_queue, []
        return [int(req.rid) for req in ready]

    def answer(self, room: int) -> dict[str, Any]:
        """Return the first token of a request that may decode, and whether its KV is right."""
        tokens = list(self.reqs[room].origin_input_ids)
        at, expected = self.slots(room, len(tokens)), self.expected(tokens, self.heads())
        right = True
        for (buffer, places), made in zip(self.buffers(at), expected, strict=True):
            seen = slice(max(0, len(tokens) - WINDOW), None) if places is not at else slice(None)
            right = right and torch.equal(buffer[places[seen]], made[seen])
        return {"tokens": list(self.reqs[room].output_ids), "right": right, "cached": self.reqs[room].prefix_len}

    def finish(self, room: int) -> None:
        """End a request that decodes; its prompt stays in the prefix tree."""
        release_kv_cache(self.reqs.pop(room), self.tree_cache, checkpoint=True)

    def held(self) -> int:
        """Return how many failed requests' pages are kept since they may be written to."""
        return int(self.disagg_decode_transfer_queue.num_pending_deferred_releases())
