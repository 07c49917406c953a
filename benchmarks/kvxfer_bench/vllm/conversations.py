"""What a router for conversations does: at each turn it tells the prefill server where the KV of the last turn is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvxfer_vllm.demo.routing import PREFILL_PARAMS, Generated, complete
from kvxfer_vllm.demo.servers import Server

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


class PlayedTurn(NamedTuple):
    """What the two servers have said in one turn."""

    prefill: Generated
    decode: Generated


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
        first = complete(self._prefill, prompt, 1, to_p, timeout)
        if not first.kv_transfer_params:
            raise self._prefill.error(f"offered no KV cache for a prompt of {len(prompt)} tokens")
        answer = complete(self._decode, prompt, tokens, first.kv_transfer_params, timeout)
        self.told = answer.kv_transfer_params
        return PlayedTurn(first, answer)
