"""kvxfer for vLLM: ``KVXferConnector``, loaded by module path or, through vLLM's plugin entry point, by name alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvxfer.logs import logger

if TYPE_CHECKING:
    from kvxfer_vllm.connector import KVXferConnector

__all__ = ["KVXferConnector", "register"]

log = logger("kvxfer.vllm")

NAME = "KVXferConnector"


def register() -> None:
    """Register the connector with vLLM by name; vLLM calls this in every process."""
    from kvxfer_vllm.internals import register_connector

    if register_connector(NAME, "kvxfer_vllm.connector"):
        _warn_if_replaced(sys.argv)


def _warn_if_replaced(command: Sequence[str]) -> None:
    """Warn of a command line by which vLLM puts a store in the place of kvxfer, and says nothing itself."""
    offloads = any(word.replace("_", "-").startswith("--kv-offloading-size") for word in command)
    if offloads and any(NAME in word or "kvxfer_vllm" in word for word in command):
        log.warning(
            "--kv-offloading-size replaces the connector of --kv-transfer-config, so kvxfer is not used: name both in 'connectors' of a "
            "MultiConnector instead"
        )


def __getattr__(name: str) -> Any:
    """Import vLLM only when the connector is asked for, so that the demo and the CLI need not."""
    if name == NAME:
        from kvxfer_vllm.connector import KVXferConnector

        return KVXferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_replaced(name)}")


def _replaced(name: str) -> str:
    """Return why vLLM looks for another connector here, if it does."""
    if not name.endswith(("Connector", "ConnectorV1")):
        return ""
    return (
        ": if --kv-offloading-size is set, vLLM replaces 'kv_connector' by that connector; name both in 'connectors' of a "
        "MultiConnector instead"
    )
