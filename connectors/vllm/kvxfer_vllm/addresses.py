"""Where peers find a vLLM engine: NIXL's environment variables, each process's own address, a port for each data-parallel rank."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.logs import logger
from kvxfer.settings import AUTO_ADDRESS, bare, everywhere, loopback

__all__ = ["HOST", "PORT", "defaults", "located"]

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"

C = TypeVar("C", bound=Config)

log = logger("kvxfer.vllm")


def defaults(settings: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fill in settings that are missing from NIXL's side-channel variables; return the settings, and notes for the log.

    With Ray, vLLM passes the first host's environment on to workers on other hosts, so the variable may name a host that is
    not this one; such a worker uses its own address.

    Raises:
        ConfigError: The environment's port is not a valid port.
    """
    out, notes = dict(settings), []
    host, port = environ.get(HOST), environ.get(PORT)
    if host and not out.keys() & {"listen", "advertise"}:
        if everywhere(host):
            out |= {"listen": host, "advertise": AUTO_ADDRESS}
            notes.append(f"listening on {host} (from {HOST}); peers are given this host's own address")
        elif _is_here(host):
            out["listen"] = host
            notes.append(f"listening on {host} (from {HOST})")
        else:
            out["advertise"] = AUTO_ADDRESS
            notes.append(f"{HOST} is {host}, where this process cannot listen: it uses its host's own address")
    if port and "port" not in out:
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"{PORT} is {port!r}, which is not a port: set it, or the setting 'port', to one from 1 to 65535"
            )
        out["port"] = int(port)
        notes.append(f"the engine's directory listens on port {port} (from {PORT})")
    return out, tuple(notes)


def located(config: C, parallel: Any) -> C:
    """Return the settings of this process: its own address, and the port of its data-parallel rank.

    The engine of data-parallel rank n listens on ``port`` + n, whichever host it runs on and whatever balances between ranks.

    Raises:
        ConfigError: The port is above 65535, the host's address is not found, or other hosts of this engine cannot reach it.
    """
    config = config.located(_own_address)
    _check_reach(config, parallel)
    rank = getattr(parallel, "data_parallel_index", 0)
    if not config.port or not rank:
        return config
    if config.port + rank > 65535:
        raise ConfigError(f"data-parallel rank {rank} has no port: 'port' {config.port} plus {rank} is above 65535")
    return msgspec.structs.replace(config, port=config.port + rank)


def _check_reach(config: Config, parallel: Any) -> None:
    """Refuse a loopback address for an engine of several hosts: peers would look for it on their own host."""
    address = config.advertise or config.listen
    if not loopback(address):
        return
    nodes = getattr(parallel, "nnodes", 1)
    if nodes > 1:
        raise ConfigError(
            f"an engine of {nodes} hosts cannot be found at {address}, which means a different host on each: set 'advertise' to 'auto'"
        )
    if getattr(parallel, "distributed_executor_backend", None) == "ray" and parallel.world_size > 1:
        log.warning(
            "peers will look for this engine's workers at %s, which works only for workers on this host, and Ray may place some "
            "on others; set 'advertise' to 'auto'",
            address,
        )


def _own_address() -> str:
    """Return this host's address as vLLM determines it (``VLLM_HOST_IP`` overrides it)."""
    from vllm.utils.network_utils import get_ip

    found = str(get_ip())
    if everywhere(found):
        raise ConfigError("vLLM cannot determine this host's own address: set VLLM_HOST_IP, or 'advertise'")
    return found


def _is_here(host: str) -> bool:
    """Whether this process can listen on an address or name."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(bare(host), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.bind(where)
    except (OSError, UnicodeError):
        return False
    return True
