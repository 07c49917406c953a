"""The report that this project began with, as four runs: with vLLM's random ends of request ids and without, with an elastic
cache and without. Its router wrote both engines' addresses into the id and relayed nothing else; and tokens came out wrong.

A vLLM for CPUs moves no pages: there an elastic cache is one that its operator calls so, and which goes staged for it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import (
    BLOCK,
    MODEL_NAME,
    Cluster,
    Server,
    await_ready,
    connector,
    ended_together,
    free_port,
)
from tests.conftest import require
from tests.e2e.conftest import PATIENT, first_of
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TOKENS = 24
PROMPTS = [f"request {n}: " + f"{n * 6997} " * (5 + 25 * n) for n in range(6)]


class Engines:
    """Servers that prefill and decode, as the id says; all of them with random ends of ids, or all without."""

    def __init__(self, model: Path, logs: Path, randomised: bool, begun: list[Server]) -> None:
        self.servers: dict[str, Server] = {}
        self._at: dict[str, str] = {}
        for name, elastic in (("one", False), ("other", False), ("elastic", True)):
            port = free_port()
            config = {**PATIENT, "backend": "nixl", "backend_options": {}, "port": port, "legacy_hosts": ["127.0.0.1"]}
            env = {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": str(int(not randomised))}
            server = Forked(name, model, logs, connector("kv_both", {**config, "elastic": elastic}), (), env)
            begun.append(server)
            self.servers[name], self._at[name] = server, f"127.0.0.1:{port}"

    def ask(self, prefill: str, decode: str, prompt: str) -> list[int]:
        """Send one request to both by an id that names them, as the proxy for P2pNcclConnector did."""
        name = f"___prefill_addr_{self._at[prefill]}___decode_addr_{self._at[decode]}_{uuid.uuid4().hex}"
        body = {"model": MODEL_NAME, "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        self.servers[prefill].post("/v1/completions", {**body, "request_id": name, "max_tokens": 1})
        answer = self.servers[decode].post("/v1/completions", {**body, "request_id": name, "max_tokens": TOKENS})
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


@pytest.fixture(scope="module", params=first_of([True, False]), ids=["random ids", "plain ids"])
def engines(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    require("vllm")
    require("nixl")
    with ended_together() as begun:
        made = Engines(model, tmp_path_factory.mktemp("report"), request.param, begun)
        await_ready(made.servers.values(), 300)
        yield made


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("one", "other"), ("one", "elastic"), ("elastic", "one")],
    ids=["no elastic cache", "elastic at decode", "elastic at prefill"],
)
def test_the_report(cluster: Cluster, engines: Engines, prefill: str, decode: str) -> None:
    p, d = engines.servers[prefill], engines.servers[decode]
    prompts = [f"from {prefill} to {decode}, {prompt}" for prompt in PROMPTS]
    expected = [complete(cluster.plain, prompt, TOKENS).tokens for prompt in prompts]
    before = received(d)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: engines.ask(prefill, decode, prompt), prompts)) == expected
    moved = received(d) - before
    assert moved.failed == 0
    assert moved.tokens >= sum(map(len, prompts)) - len(prompts) * BLOCK

    relayed = f"by a router that relays, {prompts[-1]}"
    assert prefill_then_decode(p, d, relayed, TOKENS).tokens == complete(cluster.plain, relayed, TOKENS).tokens
    assert (received(d) - before).tokens >= moved.tokens + len(relayed) - BLOCK
    for server, is_elastic in ((p, prefill == "elastic"), (d, decode == "elastic")):
        assert ("is elastic" in server.log.read_text()) is is_elastic
