"""Engines of different tensor and pipeline parallel sizes, real servers with real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, Server, await_ready, connector, ended_together
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

PROMPTS = [
    "short",
    "exactly a few blocks: " + "ab" * 117,
    "many chunks: " + "".join(chr(97 + n * n % 26) for n in range(700)),
]
TWO = ["--tensor-parallel-size", "2"]
# vLLM 0.32 on CPUs makes the buffers between stages while it warms up, which it does not with --enforce-eager.
STAGES = [
    "--pipeline-parallel-size",
    "2",
    "--no-enforce-eager",
    "--compilation-config",
    '{"mode": 1, "backend": "eager"}',
]
SMALL_STEPS = ["--max-num-batched-tokens", "96"]


@pytest.fixture(scope="module")
def servers(
    cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[dict[str, Server]]:
    """Each started once; every prefill server serves every decode server."""
    logs = tmp_path_factory.mktemp("ranks")
    with ended_together() as begun:

        def start(name: str, role: str, flags: list[str]) -> Server:
            server = Forked(name, model, logs, connector(role, PATIENT), flags)
            begun.append(server)
            return server

        started = {
            "prefill TP 2": start("prefill-tp-2", "kv_producer", [*TWO, *SMALL_STEPS]),
            "decode TP 2": start("decode-tp-2", "kv_consumer", TWO),
        }
        if any("PP" in item.name for item in request.session.items):
            started["prefill PP 2"] = start("prefill-pp-2", "kv_producer", STAGES)
        await_ready(started.values(), 300.0)
        yield started | {"prefill TP 1": cluster.prefill, "decode TP 1": cluster.decode}


STAGED = [pytest.param("PP 2", to, marks=pytest.mark.slow) for to in ("TP 1", "TP 2")]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("TP 1", "TP 2"), ("TP 2", "TP 1"), ("TP 2", "TP 2"), *STAGED],
    ids=lambda ranks: ranks.replace(" ", ""),
)
def test_tokens_are_those_of_one_plain_server(
    cluster: Cluster, servers: dict[str, Server], prefill: str, decode: str
) -> None:
    """The TP 2 prefill server also computes in smaller steps than the decode servers."""
    producer, consumer = servers[f"prefill {prefill}"], servers[f"decode {decode}"]
    for text in PROMPTS:
        prompt = f"{prefill} {decode} {text}"  # no other case's, which the prefix cache would know
        before = received(consumer)
        tokens = prefill_then_decode(producer, consumer, prompt, 24).tokens
        moved = received(consumer) - before
        assert tokens == complete(cluster.plain, prompt, 24).tokens
        assert moved.failed == 0
        assert moved.tokens > 0, "nothing came from prefill: this would test recomputation"
