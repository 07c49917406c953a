"""Where an engine of vLLM is found: what manifests for NIXL set, each process's own address, a port for each rank."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.settings import AUTO_ADDRESS, everywhere, loopback

__all__ = ["HOST", "PORT", "defaults", "located"]

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"

C = TypeVar("C", bound=Config)

log = logging.getLogger("kvxfer.vllm")


def defaults(settings: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings with what the environment says of NIXL's side channel, where they say nothing, and notes on it.

    The host may be another's: vLLM hands the environment of the first host to workers on others (Ray), and these then
    take their own address.

    Raises:
        ConfigError: The environment's port is none.
    """
    out, notes = dict(settings), []
    host, port = environ.get(HOST), environ.get(PORT)
    if host and not out.keys() & {"listen", "advertise"}:
        if everywhere(host):
            out |= {"listen": host, "advertise": AUTO_ADDRESS}
            notes.append(f"listening on {host}, as {HOST} says, and peers are told this host's own address")
        elif _is_here(host):
            out["listen"] = host
            notes.append(f"listening on {host}, as {HOST} says")
        else:
            out["advertise"] = AUTO_ADDRESS
            notes.append(f"{HOST} is {host}, which this process cannot listen on: it takes its host's own address")
    if port and "port" not in out:
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"{PORT} is {port!r}, which is no port; set it, or 'port', to one")
        out["port"] = int(port)
        notes.append(f"the engine's directory is at port {port}, as {PORT} says")
    return out, tuple(notes)


def located(config: C, parallel: Any) -> C:
    """Return the settings of this process: its own address, and the port of its data-parallel rank.

    Of the engines that data parallelism makes of one command, each has the port that is set and its rank's number more, on
    whichever host it runs and whoever balances between them.

    Raises:
        ConfigError: There is no such port, or no address, or one that other hosts of this engine do not reach.
    """
    config = config.located(_own_address)
    _check_reach(config, parallel)
    rank = getattr(parallel, "data_parallel_index", 0)
    if not config.port or not rank:
        return config
    if config.port + rank > 65535:
        raise ConfigError(f"data-parallel rank {rank} has no port: 'port' {config.port} and {rank} are above 65535")
    return msgspec.structs.replace(config, port=config.port + rank)


def _check_reach(config: Config, parallel: Any) -> None:
    """Refuse an engine of several hosts of which each would tell peers to look on their own one."""
    address = config.advertise or config.listen
    if not loopback(address):
        return
    nodes = getattr(parallel, "nnodes", 1)
    if nodes > 1:
        raise ConfigError(
            f"an engine of {nodes} hosts cannot be found at {address}, which each host takes for itself: set 'advertise' to 'auto'"
        )
    if getattr(parallel, "distributed_executor_backend", None) == "ray" and parallel.world_size > 1:
        log.warning(
            "peers are told to find this engine's workers at %s: that does for workers on this host, but Ray may place them on "
            "others; set 'advertise' to 'auto'",
            address,
        )


def _own_address() -> str:
    """Return what vLLM takes for this host's address, which ``VLLM_HOST_IP`` may say."""
    from vllm.utils.network_utils import get_ip

    found = str(get_ip())
    if everywhere(found):
        raise ConfigError("vLLM does not find this host's own address: set VLLM_HOST_IP, or 'advertise'")
    return found


def _is_here(host: str) -> bool:
    """Whether this process can listen on an address or name."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.bind(where)
    except (OSError, UnicodeError):
        return False
    return True
