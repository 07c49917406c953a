"""A prefill and a decode server give the tokens that one plain server gives, and KV really moves between them."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvxfer_vllm.demo.metrics import ReceivedKV, received, total
from kvxfer_vllm.demo.model import HEAD_DIM, KV_HEADS, LAYERS
from kvxfer_vllm.demo.prompts import PROMPTS, compare, objections
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete, prefill_then_decode
from kvxfer_vllm.demo.servers import BLOCK, CHUNK, Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TOKEN_BYTES = LAYERS * KV_HEADS * 2 * HEAD_DIM * 4


@pytest.mark.parametrize("name", PROMPTS)
def test_tokens_are_those_of_a_plain_server_and_kv_came_from_prefill(cluster: Cluster, name: str) -> None:
    outcome = compare(cluster, name, PROMPTS[name])
    assert outcome.tokens == outcome.expected
    assert objections([outcome]) == []
    assert outcome.received.kv_bytes >= outcome.received.tokens * TOKEN_BYTES > 0


def test_every_layer_writes_where_kvxfer_reads(cluster: Cluster) -> None:
    for server in (cluster.prefill, cluster.decode):
        (line,) = [line for line in server.log.read_text().splitlines() if "write their KV cache as described" in line]
        assert f" {LAYERS} of {LAYERS} layers write" in line and "not checked" not in line


def test_a_prompt_that_decode_saw_is_not_moved_again(cluster: Cluster) -> None:
    prompt = "seen before: " + "".join(chr(65 + n * n % 26) for n in range(4 * BLOCK))
    first = compare(cluster, "first", prompt)
    again = compare(cluster, "again", prompt)
    assert again.identical
    assert again.received.kv_bytes < first.received.kv_bytes


def test_many_requests_at_once(cluster: Cluster) -> None:
    prompts = [f"request {n}: " + f"{n * 7919} " * (5 + 20 * n) for n in range(8)]
    assert max(map(len, prompts)) > 2 * CHUNK
    expected = [complete(cluster.plain, prompt, 24).tokens for prompt in prompts]
    before = received(cluster.decode)
    with ThreadPoolExecutor(len(prompts)) as pool:
        completions = pool.map(lambda p: prefill_then_decode(cluster.prefill, cluster.decode, p, 24), prompts)
    assert [completion.tokens for completion in completions] == expected
    moved = received(cluster.decode) - before
    assert moved.failed == 0
    assert moved.tokens >= sum(len(prompt) for prompt in prompts) - len(prompts) * BLOCK


def test_requests_without_a_transfer_are_served_as_ever(cluster: Cluster) -> None:
    prompt = "nobody prefilled this"
    before = received(cluster.decode)
    assert complete(cluster.decode, prompt, 16).tokens == complete(cluster.plain, prompt, 16).tokens
    assert received(cluster.decode) - before == before - before


def ids(n: int, seed: int) -> list[int]:
    return [33 + (7 * i + 31 * seed + i * i % 13) % 90 for i in range(n)]


def loaded(cluster: Cluster, prompt: list[int], params: dict[str, Any] | None) -> ReceivedKV:
    """Decode answers as the plain server does, by vLLM's default policy with an error if a load fails; what it received."""
    before = received(cluster.decode)
    assert complete(cluster.decode, prompt, 16, params).tokens == complete(cluster.plain, prompt, 16).tokens
    return received(cluster.decode) - before


def nothing_is_held(cluster: Cluster) -> None:
    """Prefill has its blocks back long before a lease has ended. It says so with a step."""
    end = time.monotonic() + 40
    while total(cluster.prefill, "kvxfer_offers_in_hand"):
        assert time.monotonic() < end, "prefill holds blocks for its lease"
        complete(cluster.prefill, "a step", 1)


def test_a_proxy_that_appends_the_first_token_of_prefill(cluster: Cluster) -> None:
    """And calls again, as the Responses API does after a tool, with a longer prompt and the same params."""
    for seed, n in enumerate((5, BLOCK, CHUNK + 70)):
        prompt = ids(n, seed)
        first = complete(cluster.prefill, prompt, 1, PREFILL_PARAMS)
        prompt += first.tokens
        moved = loaded(cluster, prompt, first.kv_transfer_params)
        assert (moved.tokens, moved.failed) == (n, 0) and moved.kv_bytes >= n * TOKEN_BYTES
        nothing_is_held(cluster)
        again = loaded(cluster, [*prompt, *ids(40, seed + 10)], first.kv_transfer_params)
        assert (again.tokens, again.failed) == (0, 0)


@pytest.mark.parametrize("other", [ids(200, 21), ids(150, 20), [*ids(199, 20), 33]], ids=["another", "shorter", "end"])
def test_a_proxy_that_sends_decode_another_prompt(cluster: Cluster, other: list[int]) -> None:
    params = complete(cluster.prefill, ids(200, 20), 1, PREFILL_PARAMS).kv_transfer_params
    moved = loaded(cluster, other, params)
    assert (moved.tokens, moved.failed) == (0, 0)
    nothing_is_held(cluster)
