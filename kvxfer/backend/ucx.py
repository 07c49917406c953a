"""Settings that make UCX open ports only where ``listen`` says, and what its log tells: for every back end built on UCX.

UCX cannot authenticate. Anybody who reaches a port of its TCP transport can read and write this process's memory, or end it. And
unless told otherwise, it opens one on every network device of the host.

It also believes what an address says: that its owner is on this host, and which process and shared memory it means. So no context of
UCX may have both a network and shared memory (``split``): what comes from a network then leads to no process of this host.
Addresses of the other context are told over a Unix socket only (``introduction``).
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from kvxfer.backend.ports import device_of
from kvxfer.logs import logger
from kvxfer.settings import everywhere, loopback

__all__ = ["TELLS", "Split", "carried_by", "confined", "fallbacks", "split"]

TELLS = {"UCX_LOG_LEVEL": "info"}
"""What makes UCX log which transports it has chosen."""

_CHOSEN = re.compile(r"(intra-node|inter-node) cfg#\d+ (.*)")
_CARDS = Path("/sys/class/infiniband")

_MESSAGES = {"posix", "sysv", "xpmem"}
_GROUPS = {
    "mm": _MESSAGES,
    "sm": _MESSAGES | {"cma", "knem"},
    "shm": _MESSAGES | {"cma", "knem"},
    "cuda": {"cuda_copy", "cuda_ipc", "gdr_copy"},
}
"""UCX's names for several of the transports that share memory within a host or reach a GPU's."""
_ANYWHERE = {"cuda_copy", "gdr_copy"}
_WITHIN = _GROUPS["sm"] | {"self", "cuda_ipc", "rocm_ipc", "ze_ipc"}
_RARE = {"xpmem", "knem", "gdr_copy"}

_log = logger("kvxfer.transport")


def carried_by(log: str) -> str | None:
    """Return which transports UCX has chosen, in the words of its log; ``None`` if the log does not say."""
    return "; ".join(dict.fromkeys(f"{where}: {how.strip()}" for where, how in _CHOSEN.findall(log))) or None


def confined(listen: str, given: Collection[str], gpus: bool) -> dict[str, str]:
    """Return UCX settings, without the prefix ``UCX_``, that confine its ports, except what the operator has set.

    Args:
        listen: With a loopback address, UCX uses only shared memory (and GPUs) and opens no port at all. With another
            address, it uses TCP on the network device that has it, and all RDMA devices, which open no ports. With a
            wildcard it is not confined.
        given: Names of settings in the back end's options. Those in the environment are respected as well.
        gpus: Whether there are GPUs.

    Raises:
        ConfigError: ``listen`` is not an address of this host.
    """
    for name in ("TLS", "NET_DEVICES"):
        if name not in given and (value := os.environ.get(f"UCX_{name}")) is not None:
            _warn(name, value, listen)
    settled = {name for name in ("TLS", "NET_DEVICES") if name in given or f"UCX_{name}" in os.environ}
    if everywhere(listen) or "NET_DEVICES" in settled:
        return {}
    if loopback(listen) and "TLS" not in settled:
        return {"TLS": "self,sm,cuda" if gpus else "self,sm"}
    return {"NET_DEVICES": ",".join([device_of(listen), *_cards()])}


def fallbacks(listen: str, given: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Return why UCX would use TCP between hosts although the operator may expect RDMA; nothing if ``listen`` is a loopback address.

    Args:
        listen: As for ``confined``.
        given: The operator's settings of UCX, without the prefix. Those in the environment are looked up here.
        root: Where the file system of the host begins.
    """
    if loopback(listen):
        return []
    cards = sorted(card.name for card in (root / "sys/class/infiniband").glob("*"))
    if not cards:
        return [
            "no RDMA device is visible in /sys/class/infiniband, so UCX has only TCP: give the container one, as with a resource rdma/..."
        ]
    out = []
    doors = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not doors:
        out.append(
            f"{', '.join(cards)} cannot be opened, because /dev/infiniband has no uverbs: give the container that device"
        )
    elif not any(os.access(door, os.R_OK | os.W_OK) for door in doors):
        out.append(f"{', '.join(cards)} cannot be opened, because this user may not write to /dev/infiniband/uverbs*")
    for name, says in (("TLS", _allows_rdma), ("NET_DEVICES", partial(_names_card, cards))):
        value = given.get(name) or os.environ.get(f"UCX_{name}")
        if value is not None and not says(value):
            where = f"option {name!r}" if name in given else f"UCX_{name} in the environment"
            out.append(f"{where} is {value!r:.100}, which leaves out {', '.join(cards)}: UCX then has only TCP")
    if not _loads("libibverbs.so.1"):
        out.append(
            "libibverbs.so.1 cannot be loaded: install libibverbs1 and ibverbs-providers (Debian) or rdma-core (Red Hat)"
        )
    elif not any((root / "etc/libibverbs.d").glob("*.driver")):
        out.append(
            "libibverbs has no drivers in /etc/libibverbs.d: install ibverbs-providers (Debian) or rdma-core (Red Hat)"
        )
    return out


def _allows_rdma(tls: str) -> bool:
    items = {item.strip().lstrip("\\").partition(":")[0] for item in tls.removeprefix("^").split(",")}
    found = {item for item in items if item in ("all", "ib") or item.partition("_")[0] in ("rc", "dc", "ud", "srd")}
    return not (found & {"all", "ib"}) if tls.startswith("^") else bool(found)


def _names_card(cards: Collection[str], devices: str) -> bool:
    named = {device.strip().partition(":")[0] for device in devices.removeprefix("^").split(",")}
    return not named >= set(cards) if devices.startswith("^") else "all" in named or not named.isdisjoint(cards)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class Split:
    """Settings of two contexts, without the prefix ``UCX_``."""

    # of the one for processes of this host, which opens no port; ``None`` if nothing that reaches them is allowed
    host: dict[str, str] | None
    # of the one for all others, which knows no shared memory; ``None`` if no network is allowed, or there is none
    network: dict[str, str] | None


def split(settings: Mapping[str, str], gpus: bool) -> Split:
    """Return these settings for one context with shared memory and one with networks.

    What ``TLS`` allows, here or in the environment, is divided between them. If it allows shared memory that carries no messages, such
    as ``rc,cuda_ipc``, the first context gets ``posix`` and ``sysv`` as well. ``gpus``: whether there are GPUs.
    """
    allowed = settings.get("TLS") or os.environ.get("UCX_TLS") or "all"
    items = [item.strip() for item in allowed.removeprefix("^").split(",")]
    named = set[str]().union(*map(_parts, items))
    if allowed.startswith("^"):
        host, network = _host_but(named, gpus), ["^sm", *sorted(_WITHIN - _GROUPS["sm"]), *items]
        networked = "tcp" not in named or bool(_cards())
    elif "all" in named:
        host, network, networked = _host_but(set(), gpus), ["^sm", *sorted(_WITHIN - _GROUPS["sm"])], True
    else:
        host = [item for item in items if _parts(item) <= (_WITHIN | _ANYWHERE if gpus else _WITHIN)]
        network = [
            part
            for item in items
            for part in ([item] if _parts(item).isdisjoint(_WITHIN) else sorted(_parts(item) & _ANYWHERE))
        ]
        networked = "tcp" in named or bool(_cards() and not set(network) <= _ANYWHERE)
    within = set[str]().union(*map(_parts, host)) & _WITHIN - {"self"}
    if within and networked and not within & _MESSAGES:
        host += ["posix", "sysv"]
    if not within and not networked:
        return Split(None, {**settings, "TLS": ",".join(network) or allowed})  # UCX says what is wrong with it
    return Split(
        {**settings, "TLS": ",".join(host), "NET_DEVICES": "all"} if within else None,
        {**settings, "TLS": ",".join(network)} if networked else None,
    )


def _host_but(refused: Collection[str], gpus: bool) -> list[str]:
    """Return what there is for processes of this host but for this; nothing if nothing carries messages."""
    found: list[str] = []
    for name in ("self", "sm", *(["cuda"] if gpus else [])):
        found += [name] if _parts(name).isdisjoint(refused) else sorted(_parts(name) - {*refused, *_RARE})
    return found if any(_parts(name) & _MESSAGES for name in found) else []


def _parts(item: str) -> set[str]:
    """Return what an item of ``TLS`` stands for."""
    name = item.lstrip("\\").partition(":")[0]
    return _GROUPS.get(name, {name})


@cache
def _warn(name: str, value: str, listen: str) -> None:
    _log.warning(
        "UCX_%s=%s is set in the environment: UCX opens all ports that it allows, whatever 'listen' (%s) says",
        name,
        value,
        listen,
    )


def _cards() -> list[str]:
    """Return the ports of RDMA devices that are up, by UCX's names."""
    ports = sorted(_CARDS.glob("*/ports/*")) if _CARDS.is_dir() else []
    return [f"{port.parent.parent.name}:{port.name}" for port in ports if "ACTIVE" in _state(port)]


def _state(port: Path) -> str:
    try:
        return (port / "state").read_text()
    except OSError:
        return ""
