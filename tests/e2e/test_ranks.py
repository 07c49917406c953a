"""Engines of different tensor and pipeline parallel sizes, real servers with real worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, Server, await_ready, connector
from tests.e2e.conftest import PATIENT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

PROMPTS = [
    "short",
    "exactly a few blocks: " + "ab" * 117,
    "many chunks: " + "".join(chr(97 + n * n % 26) for n in range(700)),
]


@contextmanager
def pair(cluster: Cluster, model: Path, logs: Path, prefill: list[str], decode: list[str]) -> Iterator[Cluster]:
    """A pair with flags of its own; the plain server is shared. Only what differs from one rank is started anew."""
    with ExitStack() as stack:

        def start(name: str, role: str, flags: list[str], shared: Server) -> Server:
            if not flags:
                return shared
            server = Server(name, model, logs, connector(role, PATIENT), flags)
            stack.callback(server.stop)
            return server

        made = Cluster(
            cluster.plain,
            start("prefill", "kv_producer", prefill, cluster.prefill),
            start("decode", "kv_consumer", decode, cluster.decode),
        )
        await_ready([made.prefill, made.decode], 300.0, lambda server: None)
        yield made


TWO = ["--tensor-parallel-size", "2"]
# vLLM 0.32 on CPUs makes the buffers between stages while it warms up, which it does not with --enforce-eager.
STAGES = ["--pipeline-parallel-size", "2", "--no-enforce-eager", "--compilation-config", '{"mode": 1, "backend": "eager"}']


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [([], TWO), (TWO, []), (TWO, TWO), (STAGES, []), (STAGES, TWO)],
    ids=["TP 1 to TP 2", "TP 2 to TP 1", "TP 2 to TP 2", "PP 2 to PP 1", "PP 2 to TP 2"],
)
def test_tokens_are_those_of_one_plain_server(
    cluster: Cluster, model: Path, tmp_path: Path, prefill: list[str], decode: list[str]
) -> None:
    with pair(cluster, model, tmp_path, prefill, decode) as servers:
        for prompt in PROMPTS:
            before = received(servers.decode)
            tokens = prefill_then_decode(servers.prefill, servers.decode, prompt, 24).tokens
            moved = received(servers.decode) - before
            assert tokens == complete(servers.plain, prompt, 24).tokens
            assert moved.failed == 0
            assert moved.tokens > 0, "nothing came from prefill: this would test recomputation"
