"""The schemas in which routers name a transfer and a prefill engine, and what of them kvxfer's own keys say.

==================== ==================================== =================================================================
schema               the prefill engine gets              the decode engine gets
==================== ==================================== =================================================================
kvxfer's             ``transfer_id``                      ``transfer_id``, ``remote_host``, ``remote_port``
vLLM's tier          ``remote_decoder``:                  ``remote_prefiller``: {``kv_request_id``, ``remote_host``,
                     {``kv_request_id``}                  ``remote_port``}
MoRIIO's             ``transfer_id``                      ``transfer_id``, ``remote_host``, ``remote_handshake_port``, perhaps
                                                          ``remote_dp_rank``
Mooncake's           ``transfer_id``                      ``transfer_id``, ``remote_bootstrap_addr`` (a URL)
NIXL's, both at once nothing: it names what it offers by  ``remote_request_id`` (the X-Request-Id of both), ``remote_host``,
                     the request's id                     ``remote_port``
==================== ==================================== =================================================================

A router that waits for the prefill engine's answer relays that (``params.py``). The port is always that of kvxfer's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from kvxfer.arguments import describe
from kvxfer.identity import Address, IdentityError, canonical_host
from kvxfer_vllm.ids import external_id

__all__ = ["HOST", "OTHERS", "PORT", "directory", "request_name", "translated"]

HOST, PORT, NAME = "remote_host", "remote_port", "transfer_id"
_HANDSHAKE, _RANK, _BOOTSTRAP = "remote_handshake_port", "remote_dp_rank", "remote_bootstrap_addr"
OTHERS = frozenset(
    {
        _HANDSHAKE,
        _RANK,
        _BOOTSTRAP,
        "remote_notify_port",
        "remote_hosts",
        "remote_dp_size",
        "remote_dp_size_local",
        "remote_tp_size",
    }
)
"""Keys of MoRIIO's and Mooncake's: those that are read, and those that kvxfer's descriptors make needless."""
_KINDS = ("cmpl-", "chatcmpl-", "generate-tokens-")
_LONGEST = 4096


def translated(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the params of other schemas into kvxfer's keys; others are returned as they are.

    Raises:
        IdentityError: ``remote_decoder`` or ``remote_prefiller`` does not name the transfer, or both are there.
    """
    if params.get("remote_decoder") is not None or params.get("remote_prefiller") is not None:
        return _tier(params)
    if not params.get("do_remote_prefill") or params.get(PORT) is not None:
        return params
    if params.get(_HANDSHAKE) is not None:
        return {**params, PORT: _sum(params[_HANDSHAKE], params.get(_RANK))}
    if isinstance(params.get(_BOOTSTRAP), str):
        return {**params, **_of_url(params[_BOOTSTRAP])}
    return params


def _tier(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Translate the schema of vLLM's peer-to-peer tier, as llm-d's ``offloading`` writes it."""
    party, *more = [key for key in ("remote_decoder", "remote_prefiller") if params.get(key) is not None]
    said = params[party]
    if more or not isinstance(said, Mapping) or not said.get("kv_request_id"):
        what = "both are there" if more else f"{party} has no kv_request_id: {describe(said)}"
        raise IdentityError(f"remote_decoder or remote_prefiller must name the transfer, and {what}")
    if party == "remote_decoder":
        return {"do_remote_decode": True, NAME: said["kv_request_id"]}
    return {"do_remote_prefill": True, NAME: said["kv_request_id"], HOST: said.get(HOST), PORT: said.get(PORT)}


def _sum(port: Any, rank: Any) -> Any:
    """Return the port of a data-parallel rank, if both are numbers or their texts; else what is there, to be refused by name."""
    try:
        return int(str(port)[:9]) + int(str(rank or 0)[:9])
    except ValueError:
        return port


def _of_url(text: str) -> dict[str, Any]:
    """Return host and port of a URL, as far as it has them."""
    try:
        found = urlsplit(text if "//" in text else f"//{text}") if len(text) <= _LONGEST else None
        return {} if found is None else {HOST: found.hostname, PORT: found.port}
    except ValueError:
        return {}


def directory(host: Any, port: Any) -> Address | None:
    """Return the directory that a host and a port name, as routers write them: the port may be a text; None if they name none."""
    if isinstance(port, str) and port.isdecimal() and len(port) <= 5:
        port = int(port)
    if not isinstance(host, str) or not 0 < len(host) <= _LONGEST or type(port) is not int or not 0 < port < 65536:
        return None
    try:
        return Address(canonical_host(host), port)
    except IdentityError:
        return None


def request_name(text: Any) -> str | None:
    """Return by which name a prefill engine offers the request that ``remote_request_id`` names; None if it names none.

    It may be the ``X-Request-Id`` itself, or what an engine has made of that.
    """
    if not isinstance(text, str) or not 0 < len(text) <= _LONGEST:
        return None
    return external_id(text).base if text.startswith(_KINDS) else text
