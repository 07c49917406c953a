"""Pairs of real vLLM servers on the same GPUs, one pair a connector with its settings, so that they are measured in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvxfer_bench.options import STOCK, parsed
from kvxfer_bench.servers import ServerPair, Starter
from kvxfer_vllm.demo.servers import Server, connector, free_port

ROLES = ("prefill", "decode")

AtOnce = Callable[[str], tuple[dict[str, Any], dict[str, Any]]]
"""From the ``X-Request-Id`` of a request that goes to both servers at once to the params of the prefill and of the decode server."""


@dataclass(frozen=True)
class VllmPair(ServerPair):
    """A pair, and one server without a connector or None.

    ``at_once``: what a router adds that sends to both at the same time, or None if the connector knows no such requests.
    """

    plain: Server | None = None
    at_once: AtOnce | None = None


def started(starter: Starter, compared: str, plain: Server | None = None) -> VllmPair:
    """Start two servers with a back end of kvxfer or a connector of vLLM's own, and its settings: ``nixl``, ``nixl:{"staging_bytes": 0}``.

    Raises:
        ConfigError: See ``parsed``.
    """
    name, settings = parsed(compared, STOCK)
    log, port = f"{name}-{len(starter.begun)}", free_port()
    where: dict[str, Any] = {"remote_host": "127.0.0.1", "remote_port": port}
    if name not in STOCK:
        there = connector("kv_producer", {"backend": name, "port": port, **settings})
        here = connector("kv_consumer", {"backend": name, **settings})
        at_once: AtOnce | None = partial(_asked, where)
    else:
        own: dict[str, Any] = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": settings}
        there, here = ({**own, "engine_id": f"{role}-{log}"} for role in ROLES)
        where |= {"remote_engine_id": there["engine_id"], "tp_size": 1}
        at_once = partial(_pushed, where) if name == STOCK[1] else None
    prefill, decode = (
        starter.start(f"{log}-{role}", role, transfer, env={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(channel)})
        for role, transfer, channel in zip(ROLES, (there, here), (port, free_port()), strict=True)
    )
    return VllmPair(prefill, decode, plain, at_once)


def _asked(there: dict[str, Any], request: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what kvxfer wants: both get the transfer's name, and the decode server the prefill server's address."""
    named = {"transfer_id": request}
    return {"do_remote_decode": True, **named}, {"do_remote_prefill": True, **named, **there}


def _pushed(there: dict[str, Any], request: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what vLLM's push connector wants: the decode server gets the prefill server's name, address and request id."""
    return {"do_remote_decode": True}, {"do_remote_prefill": True, "remote_request_id": request, **there}
