"""One HTTP request is many requests of the engine: samples, batches, one id for several requests. All through vLLM's front end."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.routing import PREFILL_PARAMS
from kvxfer_vllm.demo.servers import MODEL_NAME, Cluster, Server, ServerError
from tests.e2e.test_pair import nothing_is_held

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def ids(n: int, seed: int) -> list[int]:
    """A prompt that no other test has, so that nothing of it is cached."""
    return [33 + random.Random(f"{seed} {i} of an answer").randrange(90) for i in range(n)]


def ask(server: Server, prompt: Any, n: int = 1, *, answer: int = 16, name: str = "", **more: Any) -> dict[str, Any]:
    body = {"model": MODEL_NAME, "prompt": prompt, "n": n, "max_tokens": answer, "ignore_eos": True}
    body |= {"temperature": 1.0, "top_k": 1}  # the likeliest token, as with 0, which vLLM does not let n > 1 have
    headers = {"X-Request-Id": name} if name else {}
    return server.post("/v1/completions", {**body, "return_token_ids": True, **more}, 60.0, headers)


def tokens(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def through_both(cluster: Cluster, prompt: Any, n: int = 1, name: str = "") -> tuple[list[list[int]], dict[str, Any]]:
    """What a router does that passes everything on to both engines; the tokens, and what prefill said."""
    first = ask(cluster.prefill, prompt, n, answer=1, name=name, kv_transfer_params=PREFILL_PARAMS)
    params = first["kv_transfer_params"]
    assert params, "prefill has said nothing"
    return tokens(ask(cluster.decode, prompt, n, name=name, kv_transfer_params=params)), params


@pytest.mark.parametrize("n", [2, 4, 8])
def test_samples_of_a_prompt(cluster: Cluster, n: int) -> None:
    for seed in range(3):
        prompt = ids(150, 100 * n + seed)
        before = received(cluster.decode)
        found, _ = through_both(cluster, prompt, n)
        assert found == tokens(ask(cluster.plain, prompt, n))
        moved = received(cluster.decode) - before
        assert moved.failed == 0 and moved.tokens >= 149
        nothing_is_held(cluster)


@pytest.mark.parametrize("one_at", [None, 0, 1, 2])
def test_a_list_of_prompts(cluster: Cluster, one_at: int | None) -> None:
    prompts = [ids(100 + i, 40 + i + 10 * (3 if one_at is None else one_at)) for i in range(3)]
    if one_at is not None:
        prompts[one_at] = [40]
    before = received(cluster.decode)
    found, _ = through_both(cluster, prompts)
    assert found == tokens(ask(cluster.plain, prompts))
    moved = received(cluster.decode) - before
    assert moved.failed == 0 and moved.tokens >= sum(len(prompt) - 1 for prompt in prompts) - 1
    nothing_is_held(cluster)


def test_a_list_that_the_front_end_of_decode_rejects(cluster: Cluster) -> None:
    prompts = [ids(100 + i, 70 + i) for i in range(3)]
    params = ask(cluster.prefill, prompts, answer=1, kv_transfer_params=PREFILL_PARAMS)["kv_transfer_params"]
    with pytest.raises(ServerError):
        ask(cluster.decode, prompts, kv_transfer_params=params, logit_bias={"9999999": 1.0})
    until = time.monotonic() + 40
    while total(cluster.prefill, "kvxfer_offers_in_hand"):
        assert time.monotonic() < until, "prefill holds blocks for its lease"
        ask(cluster.prefill, "a step", answer=1)
        ask(cluster.decode, "a step", answer=1)


def test_requests_under_one_id_at_once(cluster: Cluster) -> None:
    prompts = [ids(120 + i, 80 + i) for i in range(5)]
    before = received(cluster.decode)
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: through_both(cluster, prompt, name="session")[0], prompts))
    assert found == [tokens(ask(cluster.plain, prompt)) for prompt in prompts]
    moved = received(cluster.decode) - before
    assert moved.failed == 0 and moved.tokens >= sum(len(prompt) - 1 for prompt in prompts)
    nothing_is_held(cluster)
