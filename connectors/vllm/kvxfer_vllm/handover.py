"""``kvxfer bench handover``: what a load costs a decode engine besides its bytes, counted in steps of vLLM's own scheduler.

The scheduler, the connector in both roles, agents, side channel and links are the real ones; the producer is a process of
its own. Only the forward pass is played: it takes as long as it is told to, and with steps that overlap, as vLLM's do on GPUs,
the next one is planned and launched meanwhile. While other requests decode, prompts arrive one after the other whose KV is ready
at the producer. How many steps each of them waits for is exact, and when it reached each stage of its way its trace says
(``trace`` in the settings).
"""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import statistics
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
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
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvxfer.bench.shapes import Model, Pool
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.engine import WorkerChannel
from kvxfer.identity import TransferId
from kvxfer.values import BlockTable, Offer
from kvxfer_vllm.copying import BlockCopier
from kvxfer_vllm.layout import Layout

BLOCK, BLOCKS, OTHERS, WAIT_S = 16, 2048, 8, 60.0
WARM_UP = 3
"""Loads that do not count: they make the link, and show how fast it is."""
MODEL = Model(4, 4, 256, BLOCK)
STAGES = ("fetched", "began", "asked", "announced", "heard", "arrived", "ended", "seen", "computed")
"""Those of a trace, and the launch of the step that computes the first token."""
WAYS = {"in_step": "within the step", "beside": "beside the steps"}
MODES = {"stepwise": False, "overlapped": True}

spawn = mp.get_context("spawn")


def offer_prompts(pipe: Connection, backend: str) -> None:
    """Be the producer: offer what the other side names, until it names nothing more."""
    pool = Pool(MODEL, BLOCKS, "cpu")
    pool.fill()
    config = Config(backend=backend)
    facts: dict[str, str] = pipe.recv()
    with Agent(pool.cache, config, "producer", facts) as agent, Directory(config, "producer", facts=facts) as directory:
        directory.publish((agent.member,))
        pipe.send(directory.source)
        while (named := pipe.recv()) is not None:
            transfer, digest, tokens = named
            table = BlockTable.of([range(-(-tokens // BLOCK))])
            agent.offer(Offer(transfer, digest, 1, tokens, table, True))
            agent.events()
            pipe.send(None)


@dataclass
class DecodeEngine:
    """vLLM's scheduler with a worker whose forward pass takes ``step_s``.

    overlap: a step is planned and launched while the one before it runs, and its results are seen a step later.
    """

    folder: Path
    config: dict[str, Any]
    step_s: float
    overlap: bool
    computed: dict[str, tuple[int, float]] = field(default_factory=dict)  # the step that computes it first, and when

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        config = self._vllm_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        self._worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
        scheduler = AsyncScheduler if self.overlap else Scheduler
        self._scheduler = scheduler(config, kv, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)
        connector: Any = self._scheduler.connector
        self.side = connector._sched.side
        self._aggregator = KVOutputAggregator.from_connector(connector, 1)
        pool = Pool(MODEL, BLOCKS, "cpu")
        self._memory = torch.from_numpy(pool.words)
        agent = Agent(pool.cache, Config.from_mapping(self.config), "decode", self.side.facts)
        copy = BlockCopier([self._memory], pool.cache).copy
        self._worker._work.start(agent, Layout(pool.cache, (1,)), copy=copy, channel=WorkerChannel)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        self.steps = 0
        self._flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, float]] = deque()  # launched, and when they end
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
                kv_connector_extra_config=self.config,
            ),
            device_config=DeviceConfig("cpu"),
        )

    def request(self, name: str, tokens: int, answer: int, params: dict[str, Any] | None = None) -> Request:
        """Make a request."""
        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True, extra_args=extra)
        prompt = [1 + (hash(name) + i) % 900 for i in range(tokens)]
        return Request(f"{name}-00000000", prompt, sampling, None, block_hasher=self._hasher)

    def add(self, request: Request) -> None:
        """Queue it."""
        self._scheduler.add_request(request)

    def digest(self, request: Request) -> bytes:
        """Return that of its prompt."""
        connector: Any = self._scheduler.connector
        return bytes(connector._sched._digest(request))

    def step(self) -> None:
        """Plan a step and launch it; see the results of one that has ended."""
        self.steps += 1
        output = self._scheduler.schedule()
        now = time.monotonic()
        for name in output.num_scheduled_tokens:
            self.computed.setdefault(name, (self.steps, now))
        before = self._flight[-1][-1] if self._flight else now
        ends = max(before, now) + (self.step_s if output.num_scheduled_tokens else 0.001)
        self._flight.append((output, self._launch(output, ends), ends))
        if len(self._flight) > self.overlap:
            output, result, ends = self._flight.popleft()
            _sleep_until(ends)
            self._scheduler.update_from_output(output, self._aggregator.aggregate([result]))

    def _launch(self, output: SchedulerOutput, ends: float) -> ModelRunnerOutput:
        """Call the worker's hooks around a forward pass; the last of them once it has ended, if steps do not overlap."""
        w = self._worker
        w.handle_preemptions(output.kv_connector_metadata)
        w.bind_connector_metadata(output.kv_connector_metadata)
        context = SimpleNamespace(attn_metadata=None)
        if output.has_sync_kv_loads:
            w.start_load_kv(context)
        if not self.overlap:
            _sleep_until(ends)
        if not output.has_sync_kv_loads:
            w.start_load_kv(context)
        w.wait_for_save()
        found = w.get_transfer_results(output.finished_req_ids)
        kv = KVConnectorOutput(found.finished_sending, found.finished_recving, found.failed_recving)
        kv.kv_connector_worker_meta = w.build_connector_worker_meta()
        w.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        requests = self._scheduler.requests
        whole = [requests[name].num_computed_tokens >= requests[name].num_prompt_tokens for name in names]
        tokens = [[7] if done else [] for done in whole]
        return ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens, kv_connector_output=kv)

    def until(self, name: str) -> None:
        """Step until it is computed."""
        deadline = time.monotonic() + WAIT_S
        while name not in self.computed:
            if time.monotonic() > deadline:
                raise TimeoutError(f"request {name} was not computed within {WAIT_S:g} s")
            self.step()

    def close(self) -> None:
        """End it."""
        self._worker.shutdown()
        self._scheduler.shutdown()


def _sleep_until(ends: float) -> None:
    time.sleep(max(0.0, ends - time.monotonic()))


def measure(
    tokens: int, rounds: int, step_ms: float, budget_ms: float, backend: str, overlap: bool = False
) -> dict[str, Any]:
    """Load prompts one after the other into a busy engine.

    Args:
        tokens: Of each prompt.
        rounds: How many of them count.
        step_ms: What a step takes, ms.
        budget_ms: ``step_budget`` in ms; 0 has all go beside the steps.
        backend: The back end.
        overlap: Whether steps overlap.

    Returns:
        The further steps of each load; of each stage the median over the loads, in µs from the request's arrival; and of each but
        the first what it took from the one before.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        settings = {"backend": backend, "step_budget": budget_ms / 1000, "trace": str(trace)}
        pipe, theirs = spawn.Pipe()
        producer = spawn.Process(target=offer_prompts, args=(theirs, backend), daemon=True)
        producer.start()
        engine = DecodeEngine(Path(folder), settings, step_ms / 1000, overlap)
        try:
            pipe.send(dict(engine.side.facts))
            source = pipe.recv()
            for i in range(OTHERS):
                engine.add(engine.request(f"other{i}", 16, 1 << 14))
            further, computed = [], []
            for i in range(rounds + WARM_UP):
                base = f"own/{source.epoch:x}/r{i}"
                params = {
                    "do_remote_prefill": True,
                    "remote_host": source.host,
                    "remote_port": source.port,
                    "kvxfer_transfer": base,
                    "kvxfer_epoch": f"{source.epoch:x}",
                }
                request = engine.request(f"load{i}", tokens, 1, params)
                pipe.send((TransferId(base, 0), engine.digest(request), tokens))
                pipe.recv()
                engine.step()
                begun, first = time.monotonic(), engine.steps + 1
                engine.add(request)
                engine.until(request.request_id)
                step, computing = engine.computed[request.request_id]
                further.append(step - first)
                computed.append(round(1e6 * (computing - begun)))
            pipe.send(None)
            producer.join(WAIT_S)
        finally:
            engine.close()
        lines = [json.loads(line) for line in trace.read_text().splitlines()][WARM_UP:]
    for line in lines:
        if line["failure"] is not None:
            raise SystemExit(f"a load was not delivered: {line['failure']}")
    ladders = [line["us"] | {"computed": at} for line, at in zip(lines, computed[WARM_UP:], strict=True)]
    steps = list(itertools.pairwise(STAGES))
    return {
        "further_steps": further[WARM_UP:],
        "ladder_us": {stage: round(statistics.median(x[stage] for x in ladders)) for stage in STAGES},
        "spent_us": {b: round(statistics.median(x[b] - x[a] for x in ladders)) for a, b in steps},
    }


def picture(found: dict[str, Any]) -> str:
    """Return the ladders of both ways as SVG, of steps that do not overlap."""
    ways = {way: found[key]["stepwise"]["ladder_us"] for key, way in WAYS.items()}
    most = max(max(ladder.values()) for ladder in ways.values())
    lines, y = [], 30
    for way, ladder in ways.items():
        lines.append(f'<text x="10" y="{y}" font-weight="bold">{way}</text>')
        for stage, us in ladder.items():
            y += 20
            width = max(1.0, 380 * us / most)
            lines.append(
                f'<text x="20" y="{y}">{stage}</text><rect x="190" y="{y - 11}" width="{width:.1f}" height="13"/>'
            )
            lines.append(f'<text x="{195 + width:.1f}" y="{y}">{us} µs</text>')
        y += 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {y}" font-family="sans-serif" font-size="12" fill="#345">'
    return "\n".join([head, '<rect width="680" height="100%" fill="#fff"/>', *lines, "</svg>", ""])


def handover(
    tokens: Annotated[int, typer.Option(min=2, help="Of each prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each way.")] = 20,
    step_ms: Annotated[float, typer.Option(min=0.1, help="What a step of the decode engine takes.")] = 20.0,
    budget_ms: Annotated[float, typer.Option(min=0.1, max=1000, help="`step_budget` of loads within the step.")] = 1000
    * Config().step_budget,
    backend: Annotated[str, typer.Option(help="Which back end moves the KV.")] = "cma",
    svg: Annotated[Path | None, typer.Option(help="Draw the stages into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the engine steps that a load costs while others decode, and time its stages."""
    found: dict[str, Any] = {"backend": backend, "tokens": tokens, "step_ms": step_ms, "budget_ms": budget_ms}
    for way, budget in (("in_step", budget_ms), ("beside", 0.0)):
        found[way] = {mode: measure(tokens, rounds, step_ms, budget, backend, over) for mode, over in MODES.items()}
        found[f"extra_steps_{way}"] = max(max(found[way][mode]["further_steps"]) for mode in MODES)
    if svg is not None:
        svg.write_text(picture(found))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for way, words in WAYS.items():
        typer.echo(f"{words}: {found[f'extra_steps_{way}']} further steps at most")
        for mode in MODES:
            spent = ", ".join(f"{stage} {us}" for stage, us in found[way][mode]["spent_us"].items())
            typer.echo(f"  {mode}: {found[way][mode]['further_steps']}; µs from one stage to the next: {spent}")
