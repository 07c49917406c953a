"""What a router does: one request through a prefill server, then through a decode server."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Greedy output of one request, and what a connector said about its KV cache."""

    prompt_tokens: int
    tokens: list[int]
    kv_transfer_params: dict[str, Any] | None


def complete(
    server: Server,
    prompt: str | Sequence[int],
    max_tokens: int,
    kv_transfer_params: dict[str, Any] | None = None,
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
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = kv_transfer_params
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    headers |= {} if name is None else {"X-Request-Id": name}
    answer = server.post("/v1/completions", body, timeout, headers)
    return Generated(
        prompt_tokens=answer["usage"]["prompt_tokens"],
        tokens=answer["choices"][0]["token_ids"],
        kv_transfer_params=answer.get("kv_transfer_params"),
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
