"""Settings with which UCX opens ports where ``listen`` says and nowhere else, and its log: for every back end that has a UCX inside.

UCX cannot authenticate. Whoever reaches a port of its TCP transport can read and write this process's memory, or end it. And it
opens one at every network device of the host, unless told otherwise.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

from kvxfer.backend.ports import device_of
from kvxfer.settings import everywhere, loopback

__all__ = ["TELLS", "carried_by", "confined"]

TELLS = {"UCX_LOG_LEVEL": "info"}
"""What makes UCX log which transports it has chosen."""

_CHOSEN = re.compile(r"(intra-node|inter-node) cfg#\d+ (.*)")
_CARDS = Path("/sys/class/infiniband")

_log = logging.getLogger("kvxfer.transport")


def carried_by(log: str) -> str | None:
    """Return which transports UCX has chosen by its log, in its words; ``None`` if that does not say."""
    return "; ".join(dict.fromkeys(f"{where}: {how.strip()}" for where, how in _CHOSEN.findall(log))) or None


def confined(listen: str, given: Collection[str], gpus: bool) -> dict[str, str]:
    """Return settings, without the prefix ``UCX_``, for what the operator has not settled himself.

    Args:
        listen: loopback: peers on this host are reached through shared memory (and GPUs), and no port is opened at all. An
            address: TCP runs over the network device that has it, beside all RDMA cards, which have no ports. All
            addresses: no limits.
        given: settings that the operator has given in the options. Those in the environment are respected as well.
        gpus: whether there are any.

    Raises:
        ConfigError: ``listen`` is no address of this host.
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


@cache
def _warn(name: str, value: str, listen: str) -> None:
    _log.warning(
        "UCX_%s=%s is in the environment: UCX opens the ports which that allows, wherever 'listen' (%s) is",
        name,
        value,
        listen,
    )


def _cards() -> list[str]:
    """Return the ports of RDMA cards that are up, as UCX calls them."""
    ports = sorted(_CARDS.glob("*/ports/*")) if _CARDS.is_dir() else []
    return [f"{port.parent.parent.name}:{port.name}" for port in ports if "ACTIVE" in _state(port)]


def _state(port: Path) -> str:
    try:
        return (port / "state").read_text()
    except OSError:
        return ""
