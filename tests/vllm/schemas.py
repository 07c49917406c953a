"""What routers send to a prefill engine and to a decode engine, each as data, as their sources of 2026 write it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from tests.contract.router import ASKED as NIXL
from tests.contract.router import Params
from tests.vllm.engine import PlayedEngine

LOADS: Params = {"do_remote_decode": False, "do_remote_prefill": True}


@dataclass(frozen=True)
class RouterSchema:
    """One router's, or that of several.

    routers: Who writes it.
    to_p: What P gets; ``ID`` stands for the X-Request-Id of both.
    to_d: What D gets, of P and of P's answer, which is None if both are asked at once.
    """

    routers: str
    to_p: Params
    to_d: Callable[[PlayedEngine, str, Params | None], Params]
    both: bool

    def asked(self, request: str) -> Params:
        """Return what P gets."""
        return dict(json.loads(json.dumps(self.to_p).replace("ID", request)))

    def told(self, p: PlayedEngine, request: str, answer: Params | None = None) -> Params:
        """Return what D gets, as it comes over HTTP."""
        return dict(json.loads(json.dumps(self.to_d(p, request, answer))))


def _relayed(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    assert answer is not None
    return answer


def _elsewhere(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    return {**_relayed(p, request, answer), "remote_host": "192.0.2.200"}


def _known_keys(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    """What is left where a router relays the keys of NIXL's that it knows."""
    keys = (*NIXL, "remote_request_id", "tp_size")
    return {key: value for key, value in _relayed(p, request, answer).items() if key in keys}


def _named(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    return {**LOADS, "transfer_id": f"xfer-{request}", "remote_host": p.address.host, "remote_port": p.address.port}


def _tier(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    here = p.address
    return {"remote_prefiller": {"kv_request_id": request, "remote_host": here.host, "remote_port": here.port}}


def _pushed(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    return {
        **LOADS,
        "remote_engine_id": "prefill-engine-001",
        "remote_request_id": request,
        "remote_host": p.address.host,
        "remote_port": p.address.port,
        "tp_size": 1,
        "pp_size": 1,
    }


def _moriio(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    return {
        **LOADS,
        "transfer_id": f"xfer-{request}",
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": p.address.host,
        "remote_handshake_port": str(p.address.port - 1),
        "remote_notify_port": 61005,
        "remote_dp_rank": 1,
        "remote_dp_size": 2,
        "remote_tp_size": 1,
    }


def _mooncake(p: PlayedEngine, request: str, answer: Params | None) -> Params:
    return {
        **LOADS,
        "transfer_id": f"xfer-{request}",
        "remote_engine_id": "whatever",
        "remote_bootstrap_addr": f"http://{p.address.host}:{p.address.port}",
    }


ROUTED: Params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-ID"}

SCHEMAS = {
    "relay": RouterSchema("vllm-router, vLLM's toy proxy, llm-d nixlv2, KServe, Ray, Dynamo", NIXL, _relayed, False),
    "relay, another host": RouterSchema("AIBrix shfs, production-stack", NIXL, _elsewhere, False),
    "relay, known keys": RouterSchema("routers with a fixed set of keys", NIXL, _known_keys, False),
    "named": RouterSchema(
        "kvxfer's, Ray with kvxfer registered, vLLM's push demo with transfer_id", ROUTED, _named, True
    ),
    "tier": RouterSchema("llm-d offloading", {"remote_decoder": {"kv_request_id": "ID"}}, _tier, True),
    "push": RouterSchema("vLLM's push demo, Dynamo, vllm-router: NIXL's push", NIXL, _pushed, True),
    "moriio": RouterSchema("vllm-router moriio, llm-d: MoRIIO's write mode", ROUTED, _moriio, True),
    "mooncake": RouterSchema("vllm-router mooncake, vLLM's Mooncake proxy", ROUTED, _mooncake, True),
}
