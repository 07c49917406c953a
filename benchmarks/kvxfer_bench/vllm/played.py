"""A decode engine whose forward pass is simulated: for benchmarks of what is around it.

vLLM's engine loop and scheduler, the connector in both roles, agents, side channel and links are the real ones. Only the forward pass is
simulated: it takes as long as it is told to, and with steps that overlap, as vLLM's do on GPUs, the next one is planned and launched
meanwhile. The worker lies in the process of the loop, as vLLM has it for one GPU, and calls the connector's hooks in the order of vLLM's
second model runner.
"""

from __future__ import annotations

import json
import queue
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
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
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.engine import WorkerChannel
from kvxfer.identity import Source, TransferBase, TransferId
from kvxfer.testing.remote import Remote
from kvxfer_bench.agents import POOL_BLOCKS, PROMPTS, Producer, sleep_until
from kvxfer_bench.transfer.shapes import Pool
from kvxfer_vllm.arrivals import Arrivals
from kvxfer_vllm.copying import BlockCopier
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.requests import RequestFacts
from kvxfer_vllm.said import content_name

BLOCK, WAIT_S = PROMPTS.block_tokens, 60.0


class DecodeEngine(EngineCoreProc):
    """vLLM's engine loop, without its processes and sockets, over a worker whose forward pass takes ``step_s``.

    Args:
        folder: For its files.
        settings: Of kvxfer.
        step_s: Seconds of a step.
        overlap: Whether a step is planned and launched while the one before it runs, and its results are seen a step later.

    Attributes:
        steps, begun: How many it has made, and when each of them began.
        computed: By request, the step that computes it first, and when.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], step_s: float, overlap: bool) -> None:
        init_none_hash(sha256)
        self._traces = folder / "trace.jsonl"
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        settings = settings | {"trace": str(self._traces)}
        self.vllm_config = config = _vllm_config(folder, settings, overlap)
        self.input_queue: Any = queue.Queue()
        self.output_queue: Any = queue.Queue()
        self.aborts_queue: Any = queue.Queue()
        self.log_stats = self.publish_dp_lb_stats = self.check_for_draft_tokens = False
        self.is_mm_encoder_only = self.is_pooling_model = False
        self.batch_queue_size, self.async_scheduling = 1 + overlap, overlap
        self.batch_queue: Any = deque(maxlen=2) if overlap else None
        self.step_fn = self.step_with_batch_queue if overlap else self.step
        self._weight_version = "default"

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["l"], spec)]
        kv = KVCacheConfig(num_blocks=POOL_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self._worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
        kind = AsyncScheduler if overlap else Scheduler  # the connector finds this loop, which makes it
        self.scheduler: Any = kind(config, kv, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)
        self.model_executor: Any = PlayedWorker(self._worker, self.scheduler, step_s, self._launched)
        connector = self.scheduler.connector
        self.side = connector._sched.side
        pool = Pool(PROMPTS, POOL_BLOCKS)
        agent = Agent(pool.cache, Config.from_mapping(settings), "decode", self.side.facts)
        copy = BlockCopier([torch.from_numpy(pool.words.reshape(-1))], pool.cache).copy
        self._worker._work.start(agent, Layout(pool.cache, (1,)), copy=copy, channel=WorkerChannel)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        self.steps, self.begun = 0, list[float]()
        self.computed = dict[str, tuple[int, float]]()
        self.make_step()

    def request(self, name: str, tokens: int, answer: int, params: dict[str, Any] | None = None) -> Request:
        """Make a request."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
        prompt = [1 + (hash(name) + i) % 900 for i in range(tokens)]
        return Request(f"{name}-00000000", prompt, sampling, None, block_hasher=self._hasher)

    def load_from(self, source: Source, name: str, tokens: int) -> tuple[Request, tuple[TransferId, bytes, int]]:
        """Make a request that loads its prompt from a producer, and what that is to offer for it (``Producer.compute``)."""
        base = f"own/{source.epoch:x}/{name}"
        there = {"remote_host": source.host, "remote_port": source.port}
        named = {"kvxfer_transfer": base, "kvxfer_epoch": f"{source.epoch:x}"}
        request = self.request(name, tokens, 1, {"do_remote_prefill": True, **there, **named})
        arrivals: Arrivals = self.scheduler.connector._sched._arrivals
        content = arrivals.content.digest(RequestFacts(request.request_id, 0, request), arrivals.model)
        return request, (TransferId(TransferBase(content_name(base, content)), 0), content, tokens)

    def make_step(self) -> None:
        """Make what vLLM's loop calls a step: plan one and launch it, see the results of one that has ended, and sleep if it was empty."""
        self.steps += 1
        self.begun.append(time.monotonic())
        self._process_engine_step()
        while not self.output_queue.empty():
            self.output_queue.get_nowait()

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
            self.make_step()

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
        self.scheduler.shutdown()


def _vllm_config(folder: Path, settings: dict[str, Any], overlap: bool) -> VllmConfig:
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}
    text = json.dumps(shape | named | {"num_key_value_heads": 4, "max_position_embeddings": 1 << 15})
    (folder / "config.json").write_text(text)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="float32", seed=0),
        scheduler_config=SchedulerConfig(
            max_num_seqs=64,
            max_num_batched_tokens=1 << 13,
            max_model_len=1 << 15,
            is_encoder_decoder=False,
            async_scheduling=overlap,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        load_config=LoadConfig(load_format="dummy"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KVXferConnector",
            kv_connector_module_path="kvxfer_vllm",
            kv_role="kv_consumer",
            kv_connector_extra_config=settings,
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = POOL_BLOCKS
    return config


class PlayedWorker:
    """vLLM's executor and worker in one.

    Args:
        connector: In the worker's role.
        scheduler: Knows the requests.
        step_s: What a forward pass takes.
        launched: Called with each step as it is launched.
    """

    def __init__(
        self, connector: Any, scheduler: Any, step_s: float, launched: Callable[[SchedulerOutput], object]
    ) -> None:
        self._connector, self._scheduler, self._step_s, self._launched = connector, scheduler, step_s, launched
        self._ends = 0.0  # of the device's last step
        self._output: SchedulerOutput | None = None
        self.max_concurrent_batches = 2

    def execute_model(self, output: SchedulerOutput, non_block: bool = False) -> Any:
        """Launch a step; one that computes nothing is over with that."""
        self._launched(output)
        w = self._connector
        w.handle_preemptions(output.kv_connector_metadata)
        w.bind_connector_metadata(output.kv_connector_metadata)
        if output.has_sync_kv_loads:
            w.start_load_kv(SimpleNamespace(attn_metadata=None))
        self._output = output
        if output.num_scheduled_tokens:
            self._ends = max(self._ends, time.monotonic()) + self._step_s
            return _Done(lambda: None) if non_block else None
        result = self._finish([], [])
        return _Done(lambda: result) if non_block else result

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        """Return the step's tokens, once the device has computed them."""
        output, ends = self._output, self._ends
        assert output is not None
        names = list(output.num_scheduled_tokens)
        requests = self._scheduler.requests
        whole = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in names]
        if not non_block:
            sleep_until(ends)
        result = self._finish(names, [[7] if done else [] for done in whole])

        def computed() -> ModelRunnerOutput:
            sleep_until(ends)
            return result

        return _Done(computed) if non_block else result

    def _finish(self, names: list[str], tokens: list[list[int]]) -> ModelRunnerOutput:
        w, output = self._connector, self._output
        assert output is not None
        if not output.has_sync_kv_loads:
            w.start_load_kv(SimpleNamespace(attn_metadata=None))
        w.wait_for_save()
        kv = output_of(w, output.finished_req_ids)
        kv.kv_connector_worker_meta = w.build_connector_worker_meta()
        w.clear_connector_metadata()
        if not names:
            return ModelRunnerOutput.with_kv_conn_output_only(kv)
        return ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens, kv_connector_output=kv)


class _Done(Future[Any]):
    """A future whose result is waited for where it is asked for, as vLLM waits for its device."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> Any:
        return self._wait()


def output_of(connector: Any, finished: set[str]) -> KVConnectorOutput:
    """Collect what a worker's connector reports after a step, with the calls that a model runner makes."""
    found = connector.get_transfer_results(finished)
    return KVConnectorOutput(
        found.finished_sending,
        found.finished_recving,
        failed_recving=found.failed_recving,
        invalid_block_ids=connector.get_block_ids_with_load_errors(),
    )


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
        with closing(engine), Remote("producer", Producer, shared, dict(engine.side.facts)) as producer:
            yield engine, producer, producer("source")
