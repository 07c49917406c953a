"""What a router for conversations does: at each turn it tells the prefill server where the KV of the last turn is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer_vllm.demo.routing import PREFILL_PARAMS
from kvxfer_vllm.demo.servers import MODEL_NAME, Server

FLAGS = ("--enable-prompt-tokens-details",)
"""Flags of servers that tell how many tokens of a prompt they had not to compute."""

Params = Mapping[str, Any]


def _nixl(told: Params) -> dict[str, Any]:
    """Pass on what the decode server has answered, with the host of its HTTP server, as vLLM's example router does."""
    return {**told, "do_remote_decode": True, "do_remote_prefill": False, "remote_host": "localhost"}


def _source(told: Params) -> dict[str, Any]:
    """Name the decode server as llm-d does, by the key of vLLM's peer-to-peer tier."""
    where = {key: told[key] for key in ("remote_host", "remote_port")}
    return {**PREFILL_PARAMS, "remote_kv_source": {"kv_request_id": str(told["remote_request_id"]), **where}}


def _list(told: Params) -> dict[str, Any]:
    """Name it by kvxfer's own key, which may name several."""
    return {**PREFILL_PARAMS, "kvxfer_sources": [told["kvxfer_address"]]}


SCHEMAS: dict[str, Callable[[Params], dict[str, Any]]] = {
    "nixl": _nixl,
    "remote_kv_source": _source,
    "kvxfer_sources": _list,
}
"""By name: the params that a router makes for the prefill server out of the decode server's last answer."""


@dataclass(frozen=True)
class Reply:
    """What a server has answered.

    Attributes:
        tokens: The ids of the answer.
        computed: How many tokens of the prompt the server has computed, if it is a prefill server. (A decode server repeats its number.)
        params: What its connector said about its KV.
        seconds: How long it took.
    """

    tokens: list[int]
    computed: int
    params: dict[str, Any] | None
    seconds: float


@dataclass(frozen=True)
class PlayedTurn:
    """What the two servers have done in one turn."""

    prefill: Reply
    decode: Reply


def reply_of(
    server: Server, prompt: Sequence[int], tokens: int, params: Params | None = None, timeout: float = 60.0
) -> Reply:
    """Have a server answer greedily, with exactly ``tokens`` tokens.

    Raises:
        ServerError: It failed the request.
    """
    body: dict[str, Any] = {
        **{"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        "return_token_ids": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    began = time.perf_counter()
    answer = server.post("/v1/completions", body, timeout)
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Reply(
        tokens=answer["choices"][0]["token_ids"],
        computed=answer["usage"]["prompt_tokens"] - cached,
        params=answer.get("kv_transfer_params"),
        seconds=time.perf_counter() - began,
    )


class Conversation:
    """One conversation through a prefill and a decode server.

    Args:
        schema: How the router tells the prefill server where the last turn's KV is (``SCHEMAS``); None: it does not.
    """

    def __init__(self, prefill: Server, decode: Server, schema: str | None) -> None:
        self._prefill, self._decode, self._schema = prefill, decode, schema
        self.told: dict[str, Any] | None = None  # what the decode server answered last

    def turn(self, prompt: Sequence[int], tokens: int, timeout: float = 60.0) -> PlayedTurn:
        """Have the next prompt, which is the whole history, answered with ``tokens`` tokens.

        Raises:
            ServerError: A server failed its part.
        """
        to_p = PREFILL_PARAMS if self._schema is None or self.told is None else SCHEMAS[self._schema](self.told)
        first = reply_of(self._prefill, prompt, 1, to_p, timeout)
        if not first.params:
            raise self._prefill.error(f"offered no KV cache for a prompt of {len(prompt)} tokens")
        answer = reply_of(self._decode, prompt, tokens, first.params, timeout)
        self.told = answer.params
        return PlayedTurn(first, answer)
