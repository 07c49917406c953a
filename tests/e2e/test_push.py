"""Over HTTP: NIXL's push schema, in which both servers are asked at once under one X-Request-Id, and a router that gives a transfer up."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import BLOCK, CHUNK, MODEL_NAME, Cluster, Server
from tests.e2e.test_pair import nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def ask(server: Server, request: str, prompt: str, n: int, params: dict[str, Any]) -> list[int]:
    body = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": n,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }
    return list(server.post("/v1/completions", body, 60, {"X-Request-Id": request})["choices"][0]["token_ids"])


@pytest.mark.parametrize("d_first", [True, False])
def test_both_at_once_under_one_request_id(cluster: Cluster, d_first: bool) -> None:
    said = complete(cluster.prefill, "where are you?", 1, PREFILL_PARAMS).kv_transfer_params
    assert said is not None
    complete(cluster.decode, "where are you?", 1, said)
    where = {key: said[key] for key in ("remote_host", "remote_port", "tp_size")}
    for n, length in enumerate((BLOCK, CHUNK + 50)):
        prompt, request = (
            f"{d_first} {n} " + "".join(chr(97 + (n + i * i) % 26) for i in range(length)),
            str(uuid.uuid4()),
        )
        expected = complete(cluster.plain, prompt, 16).tokens
        before = received(cluster.decode)
        to_d = {**where, "do_remote_prefill": True, "remote_engine_id": "any", "remote_request_id": request}
        with ThreadPoolExecutor(2) as pool:
            calls = [(cluster.decode, 16, to_d), (cluster.prefill, 1, PREFILL_PARAMS)]
            asked = []
            for server, tokens, params in calls if d_first else calls[::-1]:
                asked.append(pool.submit(ask, server, request, prompt, tokens, params))
                time.sleep(0.3)
            answers = [one.result() for one in asked]
        assert answers[0 if d_first else 1] == expected
        moved = received(cluster.decode) - before
        assert (moved.tokens, moved.failed) == (len(prompt) - 1, 0)
    nothing_is_held(cluster)


@pytest.mark.parametrize("to", ["prefill", "decode"])
def test_a_router_gives_a_transfer_up(cluster: Cluster, to: str) -> None:
    params = complete(cluster.prefill, f"nobody comes for this, says {to} " * 5, 1, PREFILL_PARAMS).kv_transfer_params
    complete(cluster.prefill, "a step", 1)
    assert total(cluster.prefill, "kvxfer_offers_in_hand") == 1
    before = received(cluster.decode)
    complete(getattr(cluster, to), [65], 1, params)
    nothing_is_held(cluster)
    assert (received(cluster.decode) - before).kv_bytes == 0
