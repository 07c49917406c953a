"""Settings that make UCX open ports only where ``listen`` says, and what its log tells: for every back end built on UCX.

UCX cannot authenticate. Whoever reaches a port of its TCP transport can read and write this process's memory, or end it. And
unless told otherwise, it opens one on every network device of the host.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

from kvxfer.backend.ports import device_of
from kvxfer.logs import logger
from kvxfer.settings import everywhere, loopback

__all__ = ["TELLS", "carried_by", "confined"]

TELLS = {"UCX_LOG_LEVEL": "info"}
"""What makes UCX log which transports it has chosen."""

_CHOSEN = re.compile(r"(intra-node|inter-node) cfg#\d+ (.*)")
_CARDS = Path("/sys/class/infiniband")

_log = logger("kvxfer.transport")


def carried_by(log: str) -> str | None:
    """Return which transports UCX has chosen, in the words of its log; ``None`` if the log does not say."""
    return "; ".join(dict.fromkeys(f"{where}: {how.strip()}" for where, how in _CHOSEN.findall(log))) or None


def confined(listen: str, given: Collection[str], gpus: bool) -> dict[str, str]:
    """Return UCX settings, without the prefix ``UCX_``, that confine its ports, except what the operator has set.

    Args:
        listen: With a loopback address, UCX uses only shared memory (and GPUs) and opens no port at all. With another
            address, it uses TCP on the network device that has it, and all RDMA cards, which open no ports. With a
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


@cache
def _warn(name: str, value: str, listen: str) -> None:
    _log.warning(
        "UCX_%s=%s is set in the environment: UCX opens all ports that it allows, whatever 'listen' (%s) says",
        name,
        value,
        listen,
    )


def _cards() -> list[str]:
    """Return the ports of RDMA cards that are up, by UCX's names."""
    ports = sorted(_CARDS.glob("*/ports/*")) if _CARDS.is_dir() else []
    return [f"{port.parent.parent.name}:{port.name}" for port in ports if "ACTIVE" in _state(port)]


def _state(port: Path) -> str:
    try:
        return (port / "state").read_text()
    except OSError:
        return ""
