"""kvxfer for vLLM: ``KVXferConnector``, loaded by module path or, through vLLM's plugin entry point, by name alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvxfer_vllm.plugin import NAME, register

if TYPE_CHECKING:
    from kvxfer_vllm.connector import KVXferConnector

__all__ = ["KVXferConnector", "register"]


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
