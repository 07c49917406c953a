"""What a router does: one request through a prefill server, then through a decode server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer_vllm.demo.servers import MODEL_NAME, Server

# The schema that vLLM's own proxies, vllm-router and llm-d speak; they relay P's answer to D as it is.
PREFILL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Generated:
    """Greedy output of one request, and what a connector said about its KV cache.

    ``computed``: how many tokens of the prompt a prefill server has computed, if it has the flag ``--enable-prompt-tokens-details``.
    ``seconds``: how long it took.
    """

    prompt_tokens: int
    tokens: list[int]
    kv_transfer_params: dict[str, Any] | None
    computed: int
    seconds: float


def greedy(prompt: str | Sequence[int], tokens: int, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the body of a request for exactly ``tokens`` tokens behind a text or token ids; ``params`` are ``kv_transfer_params``."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return body | ({} if params is None else {"kv_transfer_params": params})


def complete(
    server: Server,
    prompt: str | Sequence[int],
    max_tokens: int,
    kv_transfer_params: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    rank: int | None = None,
    name: str | None = None,
) -> Generated:
    """Return one greedy completion, exactly `max_tokens` long, of a text or of token ids, by a data-parallel rank or any.

    ``name`` is its ``X-Request-Id``, if it has one.

    Raises:
        ServerError: The server fails it.
        NoAnswer: It took more than `timeout` seconds; having hung up makes the server abort it.
    """
    body = greedy(prompt, max_tokens, kv_transfer_params) | {"return_token_ids": True}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    headers |= {} if name is None else {"X-Request-Id": name}
    began = time.perf_counter()
    answer = server.post("/v1/completions", body, timeout, headers)
    usage = answer["usage"]
    return Generated(
        prompt_tokens=usage["prompt_tokens"],
        tokens=answer["choices"][0]["token_ids"],
        kv_transfer_params=answer.get("kv_transfer_params"),
        computed=usage["prompt_tokens"] - ((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
        seconds=time.perf_counter() - began,
    )


def prefill_then_decode(prefill: Server, decode: Server, prompt: str, max_tokens: int) -> Generated:
    """Have `prefill` compute the prompt's KV cache and `decode` fetch it and generate all tokens.

    Raises:
        ServerError: a server failed its part, or `prefill` offered no KV cache.
    """
    offered = complete(prefill, prompt, 1, PREFILL_PARAMS).kv_transfer_params
    if not offered or not offered.get("do_remote_prefill"):
        raise prefill.error(f"offered no KV cache for a prompt of {len(prompt)} tokens: {offered}")
    return complete(decode, prompt, max_tokens, offered)
