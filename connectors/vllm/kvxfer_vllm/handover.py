"""``kvxfer bench handover``: what a load costs a decode engine besides its bytes, counted in steps of vLLM's own scheduler.

The scheduler, the connector in both roles, agents, side channel and links are the real ones; the producer is a process of
its own. Only the forward pass is played: it takes as long as it is told to. While other requests decode, prompts arrive one
after the other whose KV is ready at the producer. How many steps each of them waits for is exact, and how long each stage of
its way takes is measured.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import statistics
import tempfile
import time
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
from kvxfer.protocol.values import Ended, Event
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_vllm.copying import BlockCopier
from kvxfer_vllm.layout import Layout

BLOCK, BLOCKS, OTHERS, WAIT_S = 16, 2048, 8, 60.0
MODEL = Model(4, 4, 256, BLOCK)
STAGES = ("want sent", "first byte", "last byte", "seen by the worker", "seen by the scheduler", "compute begun")

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


class Watched:
    """An agent, and when it was asked to fetch and said how that ended."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.fetched: dict[str, float] = {}
        self.ended: dict[str, tuple[float, Ended]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def fetch(self, fetch: Fetch) -> None:
        """Note when."""
        self.fetched[fetch.handle] = time.monotonic()
        self._agent.fetch(fetch)

    def events(self, timeout: float = 0.0) -> list[Event]:
        """Note when outcomes are seen."""
        found = self._agent.events(timeout)
        for event in found:
            if isinstance(event, Ended):
                self.ended[event.handle] = time.monotonic(), event
        return found


@dataclass
class DecodeEngine:
    """vLLM's scheduler with a worker whose forward pass takes ``step_s``."""

    folder: Path
    config: dict[str, Any]
    step_s: float
    seen: dict[str, float] = field(default_factory=dict)  # when the scheduler knew that a request's KV is here
    computed: dict[str, tuple[int, float]] = field(default_factory=dict)  # the step that computes it first, and when

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        config = self._vllm_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
        self._worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, kv)
        self._scheduler = Scheduler(config, kv, StructuredOutputManager(config), BLOCK, hash_block_size=BLOCK)
        connector: Any = self._scheduler.connector
        self.side = connector._sched.side
        self._aggregator = KVOutputAggregator.from_connector(connector, 1)
        self._watch(connector)
        pool = Pool(MODEL, BLOCKS, "cpu")
        self._memory = torch.from_numpy(pool.words)
        self.agent = Watched(Agent(pool.cache, Config.from_mapping(self.config), "decode", self.side.facts))
        copy = BlockCopier([self._memory], pool.cache).copy
        self._worker._work.start(self.agent, Layout(pool.cache, (1,)), copy=copy, channel=WorkerChannel)
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        self.steps = 0
        self.step()

    def _vllm_config(self) -> VllmConfig:
        shape = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
        named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000}
        text = json.dumps(shape | named | {"num_key_value_heads": 4, "max_position_embeddings": 1 << 15})
        (self.folder / "config.json").write_text(text)
        return VllmConfig(
            model_config=ModelConfig(model=str(self.folder), skip_tokenizer_init=True, dtype="float32", seed=0),
            scheduler_config=SchedulerConfig(
                max_num_seqs=64, max_num_batched_tokens=1 << 13, max_model_len=1 << 15, is_encoder_decoder=False
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

    def _watch(self, connector: Any) -> None:
        matched, update = connector.get_num_new_matched_tokens, connector.update_connector_output

        def watched_matched(request: Request, computed: int) -> Any:
            found = matched(request, computed)
            if found[0] and not found[1]:
                self.seen[request.request_id] = time.monotonic()
            return found

        def watched_update(output: KVConnectorOutput) -> None:
            update(output)
            self.seen |= dict.fromkeys(output.finished_recving or (), time.monotonic())

        connector.get_num_new_matched_tokens, connector.update_connector_output = watched_matched, watched_update

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
        """Make one."""
        self.steps += 1
        output = self._scheduler.schedule()
        w = self._worker
        w.handle_preemptions(output.kv_connector_metadata)
        w.bind_connector_metadata(output.kv_connector_metadata)
        context = SimpleNamespace(attn_metadata=None)
        if output.has_sync_kv_loads:
            w.start_load_kv(context)
        now = time.monotonic()
        for name in output.num_scheduled_tokens:
            self.computed.setdefault(name, (self.steps, now))
        time.sleep(self.step_s if output.num_scheduled_tokens else 0.001)
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
        result = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, tokens, kv_connector_output=kv)
        self._scheduler.update_from_output(output, self._aggregator.aggregate([result]))

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


def measure(tokens: int, rounds: int, step_ms: float, budget_ms: float, backend: str) -> dict[str, Any]:
    """Load prompts one after the other into a busy engine.

    Args:
        tokens: Of each prompt.
        rounds: How many of them count.
        step_ms: What a step takes, ms.
        budget_ms: ``step_budget`` in ms; 0 has all go beside the steps.
        backend: The back end.

    Returns:
        The further steps of each load, and of each stage the median over the loads, in µs from the request's arrival.
    """
    settings = {"backend": backend, "step_budget": budget_ms / 1000}
    with tempfile.TemporaryDirectory() as folder:
        pipe, theirs = spawn.Pipe()
        producer = spawn.Process(target=offer_prompts, args=(theirs, backend), daemon=True)
        producer.start()
        engine = DecodeEngine(Path(folder), settings, step_ms / 1000)
        try:
            pipe.send(dict(engine.side.facts))
            source = pipe.recv()
            for i in range(OTHERS):
                engine.add(engine.request(f"other{i}", 16, 1 << 14))
            further, ladders = [], []
            for i in range(rounds + 2):  # the first makes the link, and the second knows it
                base, name = f"own/{source.epoch:x}/r{i}", f"load{i}"
                params = {
                    "do_remote_prefill": True,
                    "remote_host": source.host,
                    "remote_port": source.port,
                    "kvxfer_transfer": base,
                    "kvxfer_epoch": f"{source.epoch:x}",
                }
                request = engine.request(name, tokens, 1, params)
                pipe.send((TransferId(base, 0), engine.digest(request), tokens))
                pipe.recv()
                engine.step()
                begun, first = time.monotonic(), engine.steps + 1
                engine.add(request)
                name = request.request_id
                engine.until(name)
                step, computing = engine.computed[name]
                fetched, (worker, ended) = engine.agent.fetched[name], engine.agent.ended[name]
                if not ended.outcome.delivered:
                    raise SystemExit(f"a load was not delivered: {ended.outcome.failure}")
                at = (fetched, fetched + ended.waited, fetched + ended.seconds, worker, engine.seen[name], computing)
                if i >= 2:
                    further.append(step - first)
                    ladders.append([1e6 * (t - begun) for t in at])
            pipe.send(None)
            producer.join(WAIT_S)
        finally:
            engine.close()
    ladder = {
        stage: round(statistics.median(column))
        for stage, column in zip(STAGES, zip(*ladders, strict=True), strict=True)
    }
    return {"further_steps": further, "ladder_us": ladder}


def picture(found: dict[str, Any]) -> str:
    """Return the ladders of both ways as SVG."""
    ways = {"within the step": found["in_step"]["ladder_us"], "beside the steps": found["beside"]["ladder_us"]}
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
    budget_ms: Annotated[float, typer.Option(min=0.1, max=1000, help="`step_budget` of loads within the step.")] = 50.0,
    backend: Annotated[str, typer.Option(help="Which back end moves the KV.")] = "cma",
    svg: Annotated[Path | None, typer.Option(help="Draw the stages into this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the engine steps that a load costs while others decode, and time its stages."""
    found: dict[str, Any] = {
        "tokens": tokens,
        "step_ms": step_ms,
        "in_step": measure(tokens, rounds, step_ms, budget_ms, backend),
        "beside": measure(tokens, rounds, step_ms, 0.0, backend),
    }
    for way in ("in_step", "beside"):
        found[f"extra_steps_{way}"] = max(found[way]["further_steps"])
    if svg is not None:
        svg.write_text(picture(found))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for way in ("in_step", "beside"):
        stages = ", ".join(f"{stage} {us} µs" for stage, us in found[way]["ladder_us"].items())
        typer.echo(f"{way.replace('_', ' ')}: {found[f'extra_steps_{way}']} further steps at most; {stages}")
