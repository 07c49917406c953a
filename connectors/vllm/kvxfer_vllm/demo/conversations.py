"""What a router for conversations does: at each turn it tells the prefill server where the KV of the last turn is."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvxfer_vllm.demo.routing import PREFILL_PARAMS
from kvxfer_vllm.demo.servers import MODEL_NAME, Server

__all__ = ["FLAGS", "SCHEMAS", "Conversation", "Said", "Turn", "say"]

FLAGS = ("--enable-prompt-tokens-details",)
"""Flags of servers that tell how many tokens of a prompt they had not to compute."""
CHUNK = b"data: {"

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
class Said:
    """What a server has streamed.

    Attributes:
        tokens: The ids of the answer.
        prompt_tokens: The length of the prompt.
        computed: How many of them the server has computed.
        params: What its connector said about its KV.
        first_s: The seconds until the first token came.
    """

    tokens: list[int]
    prompt_tokens: int
    computed: int
    params: dict[str, Any] | None
    first_s: float


@dataclass(frozen=True)
class Turn:
    """What the two servers have done in one turn, and the seconds from the client's request to its first token."""

    prefill: Said
    decode: Said
    first_s: float


def say(
    server: Server, prompt: Sequence[int], tokens: int, params: Params | None = None, timeout: float = 60.0
) -> Said:
    """Have a server answer greedily, with exactly so many tokens, in a stream.

    Raises:
        ServerError: It failed the request.
    """
    body: dict[str, Any] = {
        **{"model": MODEL_NAME, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **{"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}},
    }
    if params is not None:
        body["kv_transfer_params"] = params
    began, first = time.perf_counter(), 0.0
    ids: list[int] = []
    usage: dict[str, Any] = {}
    told: dict[str, Any] | None = None
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise server.error(f"answered {answer.status}: {answer.read(500).decode(errors='replace')}")
        for line in answer:
            if not line.startswith(CHUNK):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise server.error(f"failed a request: {chunk['error']}")
            told = chunk.get("kv_transfer_params") or told
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                first = first or time.perf_counter() - began
                ids += choice.get("token_ids") or ()
    except (OSError, http.client.HTTPException) as error:
        raise server.error(f"did not answer: {error}") from None
    finally:
        connection.close()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Said(ids, usage["prompt_tokens"], usage["prompt_tokens"] - cached, told, first)


class Conversation:
    """One conversation through a prefill and a decode server.

    Args:
        schema: How the router tells the prefill server where the last turn's KV is (``SCHEMAS``); None: it does not.
    """

    def __init__(self, prefill: Server, decode: Server, schema: str | None) -> None:
        self._prefill, self._decode, self._schema = prefill, decode, schema
        self.told: dict[str, Any] | None = None  # what the decode server answered last

    def turn(self, prompt: Sequence[int], tokens: int, timeout: float = 60.0) -> Turn:
        """Have the next prompt, which is the whole history, answered with so many tokens.

        Raises:
            ServerError: A server failed its part.
        """
        began = time.perf_counter()
        to_p = PREFILL_PARAMS if self._schema is None or self.told is None else SCHEMAS[self._schema](self.told)
        first = say(self._prefill, prompt, 1, to_p, timeout)
        if not first.params:
            raise self._prefill.error(f"offered no KV cache for a prompt of {len(prompt)} tokens")
        prefilled = time.perf_counter() - began
        answer = say(self._decode, prompt, tokens, first.params, timeout)
        self.told = answer.params
        return Turn(first, answer, prefilled + answer.first_s)
