"""The connector's settings, as an operator writes them, and those that were written for other connectors. Does not import vLLM."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvxfer.arguments import describe
from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.identity import Address, IdentityError, allowed, is_ip
from kvxfer.logs import logger
from kvxfer.security import portless
from kvxfer.settings import AUTO_ADDRESS, bare, everywhere, loopback
from kvxfer_vllm.said import ExternalId, routed_addresses

log = logger("kvxfer.vllm")

HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"

C = TypeVar("C", bound=Config)


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


Pause = Annotated[float, Meta(ge=0, le=86400, title="seconds")]


class ConnectorConfig(Config, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of the vLLM connector: kvxfer's, and some of its own.

    Attributes:
        legacy_hosts: Networks and addresses of prefill engines that a request id in the form of vLLM's former P2pNcclConnector may name.
            With none, ids are never read as addresses.
        decode_answers: Whether the answers of a decode engine name for the router where the KV of the conversation is, so that the next
            turn can be loaded from there.
        keep_answers: Time for which a decode engine keeps the KV of an answer from being evicted, while at least a quarter of its
            cache is free. With 0 it stays in the prefix cache like all else.
        blocks_outermost: Whether vLLM is asked for a cache in which all layers of a block lie side by side, where that is known to work.
        drain: Time since its last request and the last question of others in which they can still ask an engine that is shut down for
            what it holds, within vLLM's `--shutdown-timeout`. With 0 it ends with its last request and its last promise.
        trust_sources: Whether engines that a request names as sources of a prefix are asked although neither `key_file` nor `peers`
            is set. Any client that reaches this engine then chooses what it loads, and caches for others.
        secondary_tiers: Read by Dynamo alone, whose router then sends hints (`kv_hint`): where its workers can be asked.
    """

    legacy_hosts: tuple[str, ...] = ()
    decode_answers: bool = True
    keep_answers: Pause = 0.0
    blocks_outermost: bool = True
    drain: Pause = 5.0
    trust_sources: bool = False
    secondary_tiers: tuple[dict[str, Any], ...] = ()

    @classmethod
    def misfits(cls, mapping: Mapping[str, Any]) -> list[str]:
        """Return what the connector touches of vLLM's inner parts and the installed vLLM no longer has, given ``--kv-transfer-config``."""
        if "kv_connector" not in mapping or find_spec("vllm") is None:
            return []
        from kvxfer_vllm.internals import changed

        return [
            f"this vLLM has no {', '.join(lacks)}, which kvxfer needs ({touch}): use a release that kvxfer supports, or a newer kvxfer"
            for touch, lacks in changed().items()
        ]

    @classmethod
    def unwrapped(cls, mapping: dict[str, Any]) -> dict[str, Any]:
        """Return the settings in vLLM's ``--kv-transfer-config``, also if kvxfer is one of several there (``MultiConnector``).

        Raises:
            ConfigError: It names another connector, or has something else in place of settings.
        """
        if "kv_connector" not in mapping:
            return mapping
        found = [mapping]
        with suppress(AttributeError, TypeError):  # whatever else it is, it lists no connectors
            found += mapping.get("kv_connector_extra_config", {}).get("connectors", ())
        for each in (one for one in found if isinstance(one, Mapping)):
            ours = str(each.get("kv_connector_module_path") or "").startswith("kvxfer_vllm")
            if each.get("kv_connector") == "KVXferConnector" or ours:
                extra = each.get("kv_connector_extra_config") or {}
                if not isinstance(extra, dict):
                    raise ConfigError(f"'kv_connector_extra_config' must be an object, not {describe(extra)}")
                return extra
        raise ConfigError(f"'kv_connector' is {mapping['kv_connector']!r:.100}; kvxfer's is 'KVXferConnector'")


OLD_KEYS = (
    "send_type",
    "nccl_num_channels",
    "kv_buffer_size",
    "mem_pool_size_gb",
    "proxy_ip",
    "proxy_port",
    "http_ip",
    "http_port",
)
"""Keys that P2pNcclConnector read and kvxfer does not; any of them marks a configuration as written for it.
(``kv_buffer_size`` stood beside ``kv_connector_extra_config``, where vLLM now refuses it.)"""

_WITHOUT_MEANING = {
    "send_type": "no longer matters: every transfer is asynchronous and begins when both sides are ready, which "
    "PUT, PUT_ASYNC and GET each did in part",
    "kv_buffer_size": "no longer matters: KV goes into the engine's own blocks, through staging memory of a fixed size "
    "('staging_bytes')",
    "mem_pool_size_gb": "no longer matters: KV goes into the engine's own blocks, nothing overflows to host memory",
    "proxy_ip": "no longer matters: engines register nowhere; name them to the router",
    "proxy_port": "no longer matters: engines register nowhere; name them to the router",
    "http_ip": "no longer matters: it was sent to the proxy, where engines registered",
    "http_port": "no longer matters: it was sent to the proxy, where engines registered",
}
_SEND_TYPES = ("PUT", "PUT_ASYNC", "GET")
_MAX_CHANNELS = 32


def translate(extra: Mapping[str, Any], transfer_config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return kvxfer's settings from ``kv_connector_extra_config``, and notes on keys of P2pNcclConnector.

    ``transfer_config`` is the ``KVTransferConfig`` that holds them (``kv_port`` is read). For each old key, a note for the log
    says what replaces it, or why it no longer matters.

    A configuration without old keys is returned as it is, with no notes. kvxfer's own keys beside old ones win.

    Raises:
        ConfigError: An old key has a value that its connector would not have taken either.
    """
    settings = {key: value for key, value in extra.items() if key not in OLD_KEYS}
    old = {key: extra[key] for key in OLD_KEYS if key in extra}
    if not old:
        return settings, ()
    notes = [f"{key} {_WITHOUT_MEANING[key]}" for key in old if key in _WITHOUT_MEANING]
    if "send_type" in old and old["send_type"] not in _SEND_TYPES:
        raise ConfigError(f"send_type cannot be {old['send_type']!r}: it was one of {', '.join(_SEND_TYPES)}; drop it")
    if settings.setdefault("backend", "nccl") == "nccl" and "backend" not in extra:
        notes.append("'backend' is set to 'nccl', which the old connector used")
    if "nccl_num_channels" in old:
        channels = _number("nccl_num_channels", old["nccl_num_channels"], 1, _MAX_CHANNELS)
        if settings["backend"] == "nccl":
            settings["backend_options"] = {"channels": channels, **settings.get("backend_options", {})}
            notes.append("nccl_num_channels is now 'channels' in 'backend_options'")
        else:
            notes.append(f"nccl_num_channels no longer matters: back end {settings['backend']!r} has no channels")
    if "port" not in settings:
        settings["port"] = _number("kv_port", transfer_config.kv_port, 1, 65535)
        notes.append(
            "kv_port is now 'port', the engine's directory; workers listen on free ports, not on kv_port + rank"
        )
    if "listen" not in settings:
        notes.append(
            "the old connector listened on the host's address, kvxfer listens on 127.0.0.1 unless 'listen' (and, for "
            "back end 'nccl', 'listen' in 'backend_options') says otherwise; set both if there are several hosts"
        )
    return settings, tuple(notes)


def check_hosts(hosts: Iterable[str]) -> tuple[str, ...]:
    """Check the setting ``legacy_hosts``: networks and addresses of prefill engines that an id may name.

    Raises:
        ConfigError: An entry is neither.
    """
    entries = tuple(hosts)
    try:
        allowed(Address("127.0.0.1", 1), entries)
    except IdentityError as e:
        raise ConfigError(f"setting 'legacy_hosts': {e}") from None
    for host in (portless(entry).strip("[]").lower() for entry in entries if "/" not in entry):
        if not is_ip(host) and host != "localhost":
            raise ConfigError(f"setting 'legacy_hosts': {host!r} is a name; list addresses and networks")
    return entries


def params_of(
    external: ExternalId, *, produces: bool, consumes: bool, own: Address, hosts: Iterable[str]
) -> dict[str, Any] | None:
    """Derive ``kv_transfer_params`` from an id ``___prefill_addr_H:P___decode_addr_H:P_UUID``, for a request that has none.

    ``produces`` and ``consumes`` are the engine's roles; an engine with both decides by which address is its ``own`` (that
    of its directory). Returns ``None`` if the id names no addresses, or ``hosts`` is empty. Any client can choose an id, so
    only addresses that ``hosts`` allows are dialled.

    Raises:
        IdentityError: The id is malformed, names an address that is not allowed, or two that are not this engine's.
    """
    entries = tuple(hosts)
    if not entries:
        return None
    found = routed_addresses(external)
    if found is None:
        return None
    if produces and consumes:
        produces, consumes = found.prefill == own, found.decode == own
        if produces == consumes:
            raise IdentityError(
                f"request id {external.base!r} names {found.prefill} and {found.decode}; this engine has both roles, but "
                f"its address is {own}, so it cannot tell which role is meant"
            )
    # The whole id names the transfer, the same on both sides.
    if produces:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": external.base}
    if not allowed(found.prefill, entries):
        raise IdentityError(
            f"request id {external.base!r} names prefill engine {found.prefill}, which 'legacy_hosts' does not allow"
        )
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": external.base,
        "remote_host": found.prefill.host,
        "remote_port": found.prefill.port,
    }


def _number(key: str, value: Any, low: int, high: int) -> int:
    """Return a number; like the old connector, accept it as text, too."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = low - 1
    if not low <= number <= high or isinstance(value, bool):
        raise ConfigError(f"{key} cannot be {value!r}: expected a number from {low} to {high}")
    return number
