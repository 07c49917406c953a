"""vLLM's servers on a GPU where the cache's memory goes and comes: sleep mode amid traffic, and kvcached in both layouts.

kvcached must be installed for its own sake here, with its C++ part and its .pth file, beside a vLLM that it has patches for.
"""

from __future__ import annotations

import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import require

require("vllm")

from kvxfer_vllm import internals as compat  # noqa: E402  (only where vLLM is)
from kvxfer_vllm.demo.metrics import received  # noqa: E402
from kvxfer_vllm.demo.model import write_model  # noqa: E402
from kvxfer_vllm.demo.routing import prefill_then_decode  # noqa: E402
from kvxfer_vllm.demo.servers import BLOCK, Server, ServerError, ended_together  # noqa: E402
from tests.gpu.servers import TOKENS, TRITON, Servers  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.xdist_group("vllm"), pytest.mark.timeout(400)]

PROMPTS = [f"request {n}: " + f"{n * 7919} " * (5 + 20 * n) for n in range(8)]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with ended_together() as begun:
        folder = tmp_path_factory.mktemp("vllm")
        write_model(folder / "model")
        found = Servers(folder, begun, TRITON)
        found.start("plain")
        yield found


# --- sleep mode ---------------------------------------------------------------------------------------------------------

SLEEPERS = ["cuda_ipc", pytest.param("ucx", marks=pytest.mark.slow)]


class Traffic:
    """Requests from several clients that never stop, and how they end; a wrong token is kept for the test."""

    def __init__(self, servers: Servers, prefill: Server, decode: Server) -> None:
        self._servers, self._prefill, self._decode = servers, prefill, decode
        self._over = threading.Event()
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._clients = [threading.Thread(target=self._client, args=(n,)) for n in range(4)]
        for client in self._clients:
            client.start()

    def _client(self, first: int) -> None:
        number = first
        while not self._over.is_set():
            number += len(self._clients)
            prompt = PROMPTS[number % len(PROMPTS)]
            try:
                tokens = prefill_then_decode(self._prefill, self._decode, prompt, TOKENS).tokens
            except ServerError:
                self.ends["failed"] += 1  # ended by the sleep, and said so: a router tries again
                continue
            self.ends["whole" if len(tokens) == TOKENS else "cut short"] += 1
            if wrong := self._servers.wrong(prompt, tokens):
                self.wrong.append(wrong)

    def stop(self) -> None:
        self._over.set()
        for client in self._clients:
            client.join(90)


@pytest.mark.parametrize("backend", SLEEPERS)
def test_two_sleeps_of_each_amid_traffic(servers: Servers, backend: str) -> None:
    """Requests that a sleep meets end or are cut short; all tokens that come are right, and KV moves again afterwards.

    The first sleep of each keeps the weights. After the second they are loaded again.
    """
    require(backend)
    if not compat.FOLLOWS_SLEEP:
        pytest.skip("this vLLM does not tell connectors of sleep mode")
    prefill, decode = (
        servers.start(f"{role} {backend}", backend, ("--enable-sleep-mode",), {"VLLM_SERVER_DEV_MODE": "1"})
        for role in ("prefill", "decode")
    )
    servers.await_ready()
    for prompt in PROMPTS:
        servers.expected(prompt)
    traffic = Traffic(servers, prefill, decode)
    try:
        for level, sleeper in ((1, prefill), (1, decode), (2, prefill), (2, decode)):
            time.sleep(2)
            sleeper.post(f"/sleep?level={level}", {})
            time.sleep(1)
            if level == 1:
                sleeper.post("/wake_up", {})
            else:
                sleeper.post("/wake_up?tags=weights", {})
                sleeper.post("/collective_rpc", {"method": "reload_weights"})
                sleeper.post("/wake_up?tags=kv_cache", {})
        time.sleep(3)
    finally:
        traffic.stop()
    print(f"{backend}: {dict(traffic.ends)}, {received(decode)}")
    assert traffic.wrong == []
    assert traffic.ends["whole"] >= 4 * len(PROMPTS)
    before = received(decode)
    prompt = f"after the sleeps, by {backend} " * 5
    assert not servers.wrong(prompt, prefill_then_decode(prefill, decode, prompt, TOKENS).tokens)
    moved = received(decode) - before
    assert moved.failed == 0 and moved.tokens >= len(prompt) - BLOCK


# --- kvcached -----------------------------------------------------------------------------------------------------------

LAYOUTS = {"contiguous": "true", "apart": "false"}


@pytest.fixture(scope="module")
def cached(servers: Servers) -> Servers:
    """A plain server, and a pair under kvcached for each of its layouts."""
    if importlib.util.find_spec("kvcached") is None:
        pytest.skip("kvcached is not installed")
    if compat.FOLLOWS_SLEEP:
        pytest.skip("kvcached has no patches for this vLLM")
    for layout, contiguous in LAYOUTS.items():
        env = {"ENABLE_KVCACHED": "true", "KVCACHED_AUTOPATCH": "1", "KVCACHED_CONTIGUOUS_LAYOUT": contiguous}
        for name in ("prefill", "decode"):
            servers.start(f"{name} {layout}", "nixl", (), env)
    servers.await_ready()
    return servers


@pytest.mark.slow
@pytest.mark.parametrize("theirs", LAYOUTS)
@pytest.mark.parametrize("mine", LAYOUTS)
def test_tokens_under_kvcached_are_those_of_a_plain_server(cached: Servers, theirs: str, mine: str) -> None:
    """Waves of requests, so that pages are unmapped and mapped between them; from each layout into each."""
    prefill, decode = cached.started[f"prefill {theirs}"], cached.started[f"decode {mine}"]
    for server in (prefill, decode):
        log = server.log.read_text()
        assert "kvcached MRV2 persistent allocation" in log and "is elastic" in log
    before = received(decode)
    prompts = [f"{theirs} into {mine}, wave {wave}, {prompt}" for wave in range(4) for prompt in PROMPTS]
    answers: list[list[int]] = []
    for wave in range(4):
        part = slice(wave * len(PROMPTS), (wave + 1) * len(PROMPTS))
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            answers += pool.map(lambda p: prefill_then_decode(prefill, decode, p, TOKENS).tokens, prompts[part])
    assert not list(filter(None, map(cached.wrong, prompts, answers)))
    moved = received(decode) - before
    print(f"{theirs} into {mine}: {moved}")
    assert moved.failed == 0
    assert moved.tokens >= sum(map(len, prompts)) - len(prompts) * BLOCK
