"""An engine on vLLM's real `Scheduler`, with the real connector in both roles; the forward pass and the agents are played.

Every slot of the played cache holds a number that says which token of which group was computed there after which
prefix. A forward pass first checks all slots that its tokens attend to and then samples a token that depends on the
whole prefix, or `WRONG` if one slot was not what it should be: tokens are right if and only if the KV was.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import secrets
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    LoadConfig,
    LoRAConfig,
    ModelConfig,
    MultiModalConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.engine.side_channel import SideChannel
from kvxfer.geometry import Rank
from kvxfer.values import BlockTable
from kvxfer_bench.vllm.played import output_of
from kvxfer_vllm import KVXferConnector
from kvxfer_vllm.content.adapters import LoadedAdapters, adapter_loaded
from kvxfer_vllm.internals import TAKES_LOADED_WINDOWS
from tests.engine.direct import Switchboard
from tests.vllm.wire import Agent, Wire

BLOCK = 16
LONGEST = 2048
WRONG = 999
ANSWER_S = 60.0

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Group:
    """A KV-cache group; `window`: tokens that a token attends to, itself included, or 0 for all; `chunk`: it attends to
    those of its own chunk of that length.

    wide: its layers are of another precision than those of other groups, so that vLLM zeroes new blocks.
    retained: tokens behind a window whose blocks vLLM keeps for the drafts of several modules.
    state: it keeps recurrent states instead: one for a request, or, `aligned` for the prefix cache, one in the block of
        the last token; `drafts`: blocks for the states after as many draft tokens.
    ring: it keeps the last rows of a request in its only block, so many in turn; a token attends to those of its own four.
    latent: its layers keep latents, a row for so many tokens.
    replayed: vLLM does not keep its window, of latents, for prefix hits, but computes it anew.
    own: nobody else's layer: of a draft model, or (`local`) of what vLLM has excluded from transfers. What such a
        layer holds decides on no token.
    size: tokens of a block, unless the engine's `size` says otherwise.
    """

    window: int = 0
    chunk: int = 0
    wide: bool = False
    retained: int = 0
    state: bool = False
    aligned: bool = False
    drafts: int = 0
    ring: int = 0
    latent: int = 0
    replayed: bool = False
    own: bool = False
    local: bool = False
    size: int = BLOCK

    @property
    def block(self) -> int:
        if self.ring:
            return self.ring
        return LONGEST if self.state and not self.aligned else self.size

    def spec(self) -> Any:
        if self.state:
            return MambaSpec(
                block_size=self.block,
                shapes=((2048,),),
                dtypes=(torch.int8,),
                num_speculative_blocks=self.drafts,
                mamba_cache_mode="align" if self.aligned else "none",
            )
        if self.ring:
            return CircularBufferSpec(
                block_size=self.ring, num_kv_heads=1, head_size=64, head_size_v=0, dtype=torch.float32
            )
        if self.replayed and not TAKES_LOADED_WINDOWS:
            pytest.skip("this vLLM computes a replayed window anew behind a load, too")
        if self.latent or self.replayed:
            row: dict[str, Any] = {"block_size": self.size, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
            return (
                SlidingWindowMLASpec(**row, sliding_window=self.window, bounded_replay=self.replayed)
                if self.window
                else MLAAttentionSpec(**row, tokens_per_state=self.latent)
            )
        size, dtype = (8, torch.float32) if self.wide else (16, torch.bfloat16)
        shape: dict[str, Any] = {"block_size": self.size, "num_kv_heads": 2, "head_size": size, "dtype": dtype}
        if self.chunk:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.chunk)
        kept = {"extra_retained_tokens": self.retained} if self.retained else {}
        return (
            SlidingWindowSpec(**shape, sliding_window=self.window, **kept)
            if self.window
            else FullAttentionSpec(**shape)
        )

    def first(self, position: int) -> int:
        """The first position that the token at this one attends to."""
        if self.ring:
            return position // 4 * 4
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0


FULL, HYBRID, STATEFUL = (Group(),), (Group(), Group(window=24)), (Group(), Group(state=True))
MIXED = (Group(), Group(wide=True))
ALIGNED, CHUNKED = (Group(), Group(state=True, aligned=True)), (Group(), Group(chunk=32))
DRAFTING = (Group(), Group(state=True, aligned=True, drafts=2))
DRAFTED = (Group(), Group(own=True))
LOCAL = (Group(local=True), Group(), Group(window=24))


@dataclass
class Done:
    tokens: list[int]
    reason: str
    params: dict[str, Any] | None


def hashes(tokens: Sequence[int]) -> list[int]:
    """A number for each prefix."""
    out, h = [], 1
    for token in tokens:
        h = zlib.crc32(f"{h}/{token}".encode())
        out.append(h)
    return out


def answer(prompt: Sequence[int], n: int) -> list[int]:
    """What a correct engine says to a prompt."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(1 + hashes(tokens)[-1] % 900)
    return tokens[len(prompt) :]


def prompt(n: int, seed: int = 0) -> list[int]:
    return [1 + (7 * i + 131 * seed + i * i % 13) % 900 for i in range(n)]


def vllm_config(
    folder: pathlib.Path,
    transfer: KVTransferConfig,
    *,
    size: int = BLOCK,
    budget: int = 64,
    seqs: int = 8,
    caching: bool = True,
    hybrid: bool = True,
    weights: str = "dummy",
    media_cache: float = 4,
    media: dict[str, Any] | None = None,
    adapters: dict[str, Any] | None = None,
    events: KVEventsConfig | None = None,
    shutdown: int = 0,
) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=not hybrid,
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=caching),
        load_config=LoadConfig(load_format=weights),
        kv_transfer_config=transfer,
        kv_events_config=events,
        device_config=DeviceConfig("cpu"),
        shutdown_timeout=shutdown,
    )
    config.model_config.multimodal_config = MultiModalConfig(mm_processor_cache_gb=media_cache, **(media or {}))
    config.lora_config = LoRAConfig(max_loras=4, **(adapters or {}))
    return config


class PlayedEngine:
    """One engine. `overlap`: asynchronous scheduling, where a step is planned before the last one's result is seen.
    `resumes_as_new`: as with model runner 2. `stages`: its ranks are the stages of a pipeline that drafts, as with model runner 1,
    which calls `wait_for_save` at the last stage alone, and after it has asked for results. `hashed`: tokens for which the
    prefix cache has a hash, a block or less. `turns`: so many ranks take turns with the tokens of a block, which stands for those of all
    of them; this engine plays them as one. `across`: of its ranks, so many are of prefill context parallelism, which hold the same.
    `guesses`: vLLM leaves room for as many drafts of an EAGLE or MTP module, whose layers are the groups that are `own`.
    What it guesses is wrong, and not taken.
    `tensors`: where its layers would lie, for who asks. `spread`: it is a data-parallel rank behind a front end that has several."""

    block = BLOCK

    def __init__(
        self,
        wire: Wire,
        config: VllmConfig,
        groups: Sequence[Group] = FULL,
        *,
        blocks: int = 60,
        ranks: int = 1,
        overlap: bool = False,
        resumes_as_new: bool = False,
        stages: bool = False,
        hashed: int = 0,
        turns: int = 1,
        across: int = 1,
        guesses: int = 0,
        board: Switchboard | None = None,
        tensors: Callable[[Sequence[str], int], Any] = lambda layers, blocks: [],
        spread: bool = False,
    ) -> None:
        init_none_hash(sha256)
        self.config = config
        size = config.cache_config.block_size
        self.groups = groups = tuple(replace(group, size=size) for group in groups)
        self.wire, self.blocks = wire, blocks
        self.layers = _layers(self.groups)  # name -> group
        if any(g.aligned for g in groups):
            config.cache_config.mamba_cache_mode = "align"
        self.stages, self.guesses, self.guessed = stages, guesses, 0
        config.parallel_config.world_size = ranks
        if spread:
            config.kv_transfer_config.engine_id += "_dp0"
        setattr(config.parallel_config, f"{'pipeline' if stages else 'tensor'}_parallel_size", ranks // across)
        config.parallel_config.prefill_context_parallel_size = across
        config.cache_config.num_gpu_blocks = blocks
        config.scheduler_config.async_scheduling = overlap
        config.parallel_config.decode_context_parallel_size = turns
        if guesses:
            config.speculative_config = _drafting(guesses)
        hashed = hashed or size
        self.block, hashed = size * turns, hashed * turns if len(groups) == 1 else hashed
        self.memory = np.zeros((blocks, self.block), np.int64)
        kv = KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=tensors(list(self.layers), blocks),
            kv_cache_groups=[
                KVCacheGroupSpec([name], groups[i].spec(), **_marks(groups[i], bool(guesses)))
                for name, i in self.layers.items()
            ],
        )
        self.workers = [KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv) for _ in range(ranks)]
        scheduler = AsyncScheduler if overlap else Scheduler
        self._channel = None if board is None else board.worker  # without one, nothing goes past the steps
        with mock.patch("kvxfer.engine.dispatch.SideChannel", board.scheduler if board else SideChannel):
            self.scheduler = scheduler(
                vllm_config=config,
                kv_cache_config=kv,
                structured_output_manager=StructuredOutputManager(config),
                block_size=max(g.block * (1 if g.state or g.ring else turns) for g in groups),
                hash_block_size=hashed,
                log_stats=True,
            )
        self.scheduler.use_v2_model_runner = resumes_as_new
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.room = self.free  # blocks that requests can have
        self.elastic = hasattr(self.pool, "kv_cache_manager")  # kvcached's pool: only blocks in use have memory
        self.hasher = get_request_block_hasher(hashed, sha256)
        assert self.scheduler.connector is not None
        self.aggregator = KVOutputAggregator.from_connector(self.scheduler.connector, ranks)
        self.agents = [
            self._agent(ours(worker), Rank(i, 0) if stages else Rank(0, i)) for i, worker in enumerate(self.workers)
        ]
        said = ((i % (ranks // across), worker.get_handshake_metadata()) for i, worker in enumerate(self.workers))
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, i): h for i, h in said if h is not None})
        self.overlap = int(overlap)
        self.flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.tables: dict[str, list[list[int]]] = {}
        self.texts: dict[str, list[int]] = {}
        self.said: dict[str, list[int]] = {}
        self.done: dict[str, Done] = {}
        self.computed: dict[str, int] = {}  # tokens that went through our forward pass
        self.preempted: set[str] = set()
        self.broken: set[str] = set()  # requests whose prompt was computed on KV that was not theirs
        self.cleared: Callable[[SchedulerOutput], object] = lambda output: None  # called once new blocks are zeroed
        self.stats: list[Any] = []
        self.count = 0

    def _agent(self, connector: KVXferConnector, rank: Rank) -> Agent:
        agent = Agent(self.wire, self, rank)
        layout: Any = _Layout(agent.cache)
        connector._work.start(agent, layout, copy=self._copy, channel=self._channel)  # type: ignore[arg-type]
        self.wire.agents.append(agent)
        return agent

    def _copy(self, src: BlockTable, dst: BlockTable) -> None:
        for of, to in zip(src, dst, strict=True):
            for here, there in zip(of.tolist(), to.tolist(), strict=False):
                if here >= 0 and there >= 0:
                    self.memory[there] = self.memory[here]

    def load_adapter(self, number: int, content: str) -> None:
        """What vLLM does when it is told to load one: its workers load it, then ours is asked."""
        for worker in self.workers:
            self._loaded(worker).loaded(number, content)
        adapter_loaded(
            self.config.lora_config, number, lambda: [dict(self._loaded(worker).contents) for worker in self.workers]
        )
        for worker in self.workers:
            self._loaded(worker).take_news()

    def reread_adapter(self, number: int, content: str) -> None:
        """What vLLM does in a step whose adapter it has dropped before: it loads it again, and tells nobody."""
        for worker in self.workers:
            self._loaded(worker).loaded(number, content)

    @staticmethod
    def _loaded(worker: Any) -> LoadedAdapters:
        return ours(worker)._work._adapters

    # --- requests --------------------------------------------------------------------------------------------------

    def add(
        self,
        tokens: Sequence[int] | None,
        params: dict[str, Any] | None = None,
        *,
        n: int = 4,
        name: str | None = None,
        **more: Any,
    ) -> str:
        """Queue a request; the result is its id."""
        self.count += 1
        name = f"{name or f'r{self.count}'}-{secrets.token_hex(4)}"  # as vLLM does: no other engine calls it so
        return self._queue(name, tokens, params, n, more)

    def samples(self, tokens: Sequence[int], params: dict[str, Any], count: int, *, n: int = 4, name: str) -> list[str]:
        """Queue the samples of one prompt, as vLLM's front end does; the result is their ids."""
        parent = f"{name}-{secrets.token_hex(4)}"
        at = time.time()
        return [self._queue(f"{i}_{parent}", tokens, params, n, {"arrival_time": at}) for i in range(count)]

    def _queue(
        self, name: str, tokens: Sequence[int] | None, params: dict[str, Any] | None, n: int, more: dict[str, Any]
    ) -> str:
        extra = {"kv_transfer_params": params} if params is not None else None
        self.scheduler.add_request(
            Request(
                name,
                list(tokens) if tokens is not None else None,
                SamplingParams(max_tokens=n, ignore_eos=True, extra_args=extra),
                None,
                block_hasher=self.hasher,
                **more,
            )
        )
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def reject(self, tokens: Sequence[int], params: dict[str, Any], name: str) -> None:
        """What vLLM's front end has the engine do about a request that it has refused."""
        request = Request(
            name,
            [0],
            SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
            None,
            block_hasher=self.hasher,
            abort_immediately=True,
        )
        self.scheduler.add_request(request)
        self.abort(name)

    def status(self, name: str) -> str:
        return self.scheduler.requests[name].status.name

    # --- steps -----------------------------------------------------------------------------------------------------

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.preempted |= output.preempted_req_ids or set()
        self.flight.append((output, self._execute(output)))
        if len(self.flight) > self.overlap:
            self._update()
        self.wire.pump()
        return output

    def _update(self) -> None:
        output, result = self.flight.popleft()
        for outputs in self.scheduler.update_from_output(output, result).values():
            for o in outputs.outputs:
                self.said.setdefault(o.request_id, []).extend(o.new_token_ids)
                if o.finish_reason is not None:
                    self.done[o.request_id] = Done(
                        self.said.pop(o.request_id), str(o.finish_reason), o.kv_transfer_params
                    )
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.stats.append(outputs.scheduler_stats.kv_connector_stats)
        if self.guesses:
            names = [name for name in result.req_ids if name in self.scheduler.requests]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[WRONG] * self.guesses] * len(names)))

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def _execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        meta = output.kv_connector_metadata
        assert meta is not None
        if self.scheduler.use_v2_model_runner:
            self._clear(output)
        for worker in self.workers:
            worker.handle_preemptions(meta)
            worker.bind_connector_metadata(meta)
        if not self.scheduler.use_v2_model_runner:
            self._clear(output)
        names = list(output.num_scheduled_tokens)
        if output.has_sync_kv_loads:
            for worker in self.workers:
                worker.start_load_kv(SimpleNamespace(attn_metadata=None))
        tokens = self._forward(output)
        results = []
        for worker in self.workers:
            if not output.has_sync_kv_loads:
                worker.start_load_kv(SimpleNamespace(attn_metadata=None))
            if not self.stages or not names:
                worker.wait_for_save()
            kv = output_of(worker, output.finished_req_ids)
            kv.kv_connector_stats = worker.get_kv_connector_stats()
            kv.kv_connector_worker_meta = worker.build_connector_worker_meta()
            if self.stages and names and worker is self.workers[-1]:
                worker.wait_for_save()
            worker.clear_connector_metadata()
            results.append(
                ModelRunnerOutput(
                    names, {name: i for i, name in enumerate(names)}, [list(t) for t in tokens], kv_connector_output=kv
                )
            )
        result = self.aggregator.aggregate(results)
        assert result is not None
        return result

    def _clear(self, output: SchedulerOutput) -> None:
        """Zero new blocks and copy those of partial hits, which model runner 2 does before it calls the connector."""
        self.memory[output.new_block_ids_to_zero or []] = 0
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            self.memory[copy.dst_block_id] = self.memory[copy.src_block_id]
        self.cleared(output)

    def _forward(self, output: SchedulerOutput) -> list[list[int]]:
        work: list[tuple[str, int]] = []
        for new in output.scheduled_new_reqs:
            self._begin(new.req_id, new.block_ids)
            work.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for name, more, start in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            if name in cached.resumed_req_ids:
                self._begin(name, more)
            elif more is not None:
                for row, extra in zip(self.tables[name], more, strict=True):
                    row.extend(extra)
            work.append((name, start))
        spans = [(name, start, start + output.num_scheduled_tokens[name]) for name, start in work]
        for span in spans:  # of all requests, before anything is read, as in each layer of a model
            self._write(*span)
        out = {span[0]: self._sample(*span) for span in spans}
        return [out[name] for name in output.num_scheduled_tokens]

    def _begin(self, name: str, table: Any) -> None:
        self.tables[name] = [list(row) for row in table]
        self.texts[name] = list(self.scheduler.requests[name].all_token_ids)

    def _place(self, group: Group, row: list[int], position: int) -> tuple[int, int]:
        """The block and the slot of a token."""
        if group.ring:
            return row[0], position % group.ring
        return row[position // self.block], position % self.block

    def _write(self, name: str, start: int, end: int) -> None:
        drafts, end = range(len(self.texts[name]), end), min(end, len(self.texts[name]))
        self.computed[name] = self.computed.get(name, 0) + end - start
        self.guessed += len(drafts)
        known = hashes(self.texts[name][:end])
        for layer, g in self.layers.items():
            group, row = self.groups[g], self.tables[name][g]
            if group.state:
                good = not start or self.memory[row[(start - 1) // group.block], 0] == _content(layer, known[start - 1])
                at = (end - 1) // group.block
                self.memory[row[at], 0] = _content(layer, known[end - 1]) if good else WRONG
                self.memory[row[at + 1 : at + 1 + len(drafts)], 0] = WRONG
                continue
            for position in range(start, end):
                self.memory[self._place(group, row, position)] = _content(layer, known[position])
            for position in drafts:
                self.memory[self._place(group, row, position)] = WRONG

    def _sample(self, name: str, start: int, end: int) -> list[int]:
        text = self.texts[name]
        end = min(end, len(text))
        known = hashes(text[:end])
        right = True
        for layer, g in self.layers.items():
            group, row = self.groups[g], self.tables[name][g]
            if group.own or group.local:
                continue
            if group.state:
                block = row[(end - 1) // group.block]
                right &= bool(block and self.memory[block, 0] == _content(layer, known[end - 1]))
                continue
            replay = getattr(self.scheduler.requests[name], "replay_start", 0) if group.replayed or group.ring else 0
            for position in range(max(group.first(start), replay), end):
                if group.ring and position < group.first(end - 1):
                    continue  # it may have been overwritten since
                block, slot = self._place(group, row, position)
                right &= bool(block and self.memory[block, slot] == _content(layer, known[position]))
        if end < len(text):
            if not right:
                self.broken.add(name)
            return []
        text.append(1 + known[-1] % 900 if right and name not in self.broken else WRONG)
        return [text[-1]]

    # --- ends ------------------------------------------------------------------------------------------------------

    def run(self, *others: PlayedEngine, until: str | None = None) -> None:
        """Step this engine and others, each as long as it has work, until all are idle or a request is done."""
        engines = (self, *others)
        deadline = time.monotonic() + ANSWER_S
        while (until is None and any(e.busy for e in engines)) or (until is not None and until not in self.done):
            assert time.monotonic() < deadline, "the engines do not come to rest"
            for engine in engines:
                if engine.busy:
                    engine.step()

    @property
    def busy(self) -> bool:
        """Whether vLLM's engine loop would make a step."""
        while self.flight and not self.scheduler.has_requests():
            self._update()
        return self.scheduler.has_requests()

    def lease_ends(self) -> None:
        """Nobody has asked in time for what is still offered here."""
        for agent in self.agents:
            agent.lease_ends()

    @property
    def address(self) -> Any:
        return ours(self.scheduler.connector)._sched.side.source

    def is_at(self, source: Any) -> bool:
        """Whether a consumer that names this source means us."""
        here = self.address
        return (source.host, source.port) == (here.host, here.port) and source.epoch in (0, here.epoch)

    @property
    def loaded(self) -> int:
        """How many tokens its first rank has loaded from other engines."""
        return int(self.agents[0].loaded)

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def assert_clean(self) -> None:
        """Nothing is left of any request, neither in vLLM nor in the connector."""
        s = self.scheduler
        assert not s.requests and not s.running and not s.waiting
        assert not getattr(s, "kv_holding_waiting", None)  # vLLM 0.31 and later
        assert self.free == self.room, "blocks have leaked"
        assert all(b.ref_cnt == 0 for b in self.pool.blocks if not b.is_null)
        assert len(ours(s.connector)._sched) == 0, "the scheduler side remembers something"
        for worker in self.workers:
            assert len(ours(worker)._work) == 0, "a worker side remembers something"

    def close(self) -> None:
        self.scheduler.shutdown()


def _marks(group: Group, drafting: bool) -> dict[str, bool]:
    """What vLLM says of a group besides its spec."""
    return {
        **({"enable_kv_transfer": False} if group.local else {}),
        **({"is_eagle_group": True} if group.own and drafting else {}),
    }


def _drafting(guesses: int) -> SpeculativeConfig:
    """What a scheduler asks about a module that drafts. Its model, which vLLM would look for, is not there."""
    found = SpeculativeConfig(method="ngram", num_speculative_tokens=guesses, prompt_lookup_max=2)
    found.method = "mtp"
    return found


class _Layout:
    """Kernel blocks are logical blocks."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def table(self, logical: BlockTable) -> BlockTable:
        return logical


def ours(connector: Any) -> KVXferConnector:
    """Our connector, also if another holds it."""
    while not isinstance(connector, KVXferConnector):
        connector = next(
            c for c in connector.sub_connectors if isinstance(c, KVXferConnector) or hasattr(c, "sub_connectors")
        )
    return connector


def _layers(groups: Sequence[Group]) -> dict[str, int]:
    """A layer for each group. Those that other engines have, too, are called alike wherever they stand."""
    shared, own = itertools.count(), itertools.count()
    return {f"own.{next(own)}" if g.own or g.local else f"layer.{next(shared)}": i for i, g in enumerate(groups)}


def _content(layer: str, h: int) -> int:
    return int(h) * 4096 + zlib.crc32(layer.encode()) % 4096
