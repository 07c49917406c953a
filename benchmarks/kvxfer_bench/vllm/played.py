"""A decode engine whose forward pass is simulated: for benchmarks of what is around it.

vLLM's scheduler, the connector in both roles, agents, side channel and links are the real ones. Only the forward pass is simulated: it
takes as long as it is told to, and with steps that overlap, as vLLM's do on GPUs, the next one is planned and launched meanwhile.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.engine import WorkerChannel
from kvxfer.identity import Source, TransferBase, TransferId
from kvxfer.testing.remote import Remote
from kvxfer_bench.transfer.shapes import Pool
from kvxfer_bench.vllm.played_core import PlayedCore, PlayedWorker
from kvxfer_bench.vllm.played_prefill import BLOCK, BLOCKS, MODEL, WAIT_S, Producer, Prompt
from kvxfer_vllm.arrivals import Arrivals
from kvxfer_vllm.copying import BlockCopier
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.requests import RequestFacts
from kvxfer_vllm.said import content_name


@dataclass
class DecodeEngine:
    """vLLM's scheduler with a worker whose forward pass takes ``step_s``.

    steps, begun: how many it has made, and when each of them began.
    overlap: a step is planned and launched while the one before it runs, and its results are seen a step later.
    """

    folder: Path
    settings: dict[str, Any]
    step_s: float
    overlap: bool
    computed: dict[str, tuple[int, float]] = field(default_factory=dict)  # the step that computes it first, and when

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self._traces = self.folder / "trace.jsonl"
        self._config = self.settings | {"trace": str(self._traces)}
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        config = self._vllm_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        self._worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
        kind = AsyncScheduler if self.overlap else Scheduler

        def scheduler() -> Scheduler:
            return kind(config, kv, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)

        self.core = PlayedCore(config, scheduler, self.overlap)
        self._scheduler: Any = self.core.scheduler
        self.core.computes_with(PlayedWorker(self._worker, self._scheduler, self.step_s, self._launched))
        connector: Any = self._scheduler.connector
        self.side = connector._sched.side
        pool = Pool(MODEL, BLOCKS, "cpu")
        self._memory = torch.from_numpy(pool.words.reshape(-1))
        agent = Agent(pool.cache, Config.from_mapping(self._config), "decode", self.side.facts)
        copy = BlockCopier([self._memory], pool.cache).copy
        self._worker._work.start(agent, Layout(pool.cache, (1,)), copy=copy, channel=WorkerChannel)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        self.steps, self.begun = 0, list[float]()
        self.step()

    def _vllm_config(self) -> VllmConfig:
        shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
        named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}
        text = json.dumps(shape | named | {"num_key_value_heads": 4, "max_position_embeddings": 1 << 15})
        (self.folder / "config.json").write_text(text)
        return VllmConfig(
            model_config=ModelConfig(model=str(self.folder), skip_tokenizer_init=True, dtype="float32", seed=0),
            scheduler_config=SchedulerConfig(
                max_num_seqs=64,
                max_num_batched_tokens=1 << 13,
                max_model_len=1 << 15,
                is_encoder_decoder=False,
                async_scheduling=self.overlap,
            ),
            cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
            load_config=LoadConfig(load_format="dummy"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVXferConnector",
                kv_connector_module_path="kvxfer_vllm",
                kv_role="kv_consumer",
                kv_connector_extra_config=self._config,
            ),
            device_config=DeviceConfig("cpu"),
        )

    def request(self, name: str, tokens: int, answer: int, params: dict[str, Any] | None = None) -> Request:
        """Make a request."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
        prompt = [1 + (hash(name) + i) % 900 for i in range(tokens)]
        return Request(f"{name}-00000000", prompt, sampling, None, block_hasher=self._hasher)

    def load_from(
        self, source: Source, name: str, tokens: int, chunks: int = 1, seconds: float = 0.0
    ) -> tuple[Request, Prompt]:
        """Make a request that loads its prompt from a producer, and what that is to compute for it."""
        base = f"own/{source.epoch:x}/{name}"
        there = {"remote_host": source.host, "remote_port": source.port}
        named = {"kvxfer_transfer": base, "kvxfer_epoch": f"{source.epoch:x}"}
        request = self.request(name, tokens, 1, {"do_remote_prefill": True, **there, **named})
        connector: Any = self._scheduler.connector
        arrivals: Arrivals = connector._sched._arrivals
        content = arrivals.content.digest(RequestFacts(request.request_id, 0, request), arrivals.model)
        transfer = TransferId(TransferBase(content_name(base, content)), 0)
        return request, Prompt(transfer, content, tokens, chunks, seconds)

    def add(self, request: Request) -> None:
        """Queue it."""
        self._scheduler.add_request(request)

    def step(self) -> None:
        """Make what vLLM's loop calls a step: plan one and launch it, see the results of one that has ended, and sleep if it was empty."""
        self.steps += 1
        self.begun.append(time.monotonic())
        self.core.make_step()

    def _launched(self, output: SchedulerOutput) -> None:
        now = time.monotonic()
        for name in output.num_scheduled_tokens:
            self.computed.setdefault(name, (self.steps, now))

    def until(self, name: str) -> None:
        """Step until a request is computed.

        Raises:
            TimeoutError: It takes too long.
        """
        deadline = time.monotonic() + WAIT_S
        while name not in self.computed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"request {name} was not computed within {WAIT_S:g} s")
            self.step()

    def traces(self) -> list[dict[str, Any]]:
        """Return the lines of its loads so far (``trace`` in the settings).

        Raises:
            SystemExit: One was not delivered.
        """
        lines = [json.loads(line) for line in self._traces.read_text().splitlines()]
        for line in lines:
            if line["failure"] is not None:
                raise SystemExit(f"a load was not delivered: {line['failure']}")
        return lines

    def close(self) -> None:
        """End it."""
        self._worker.shutdown()
        self._scheduler.shutdown()


@contextmanager
def engines(settings: dict[str, Any], step_s: float, overlap: bool) -> Iterator[tuple[DecodeEngine, Remote, Source]]:
    """Have both engines, and where the producer is found: a ``Producer`` in a process of its own.

    Args:
        settings: Of kvxfer, for the decode engine.
        step_s: What its forward pass takes, in seconds.
        overlap: Whether its steps overlap.
    """
    shared = {key: value for key, value in settings.items() if key.startswith("backend")}
    with tempfile.TemporaryDirectory() as folder:
        engine = DecodeEngine(Path(folder), settings, step_s, overlap)
        producer = Remote("producer", Producer, shared, dict(engine.side.facts))
        try:
            yield engine, producer, producer("source")
        finally:
            producer.close()
            engine.close()
