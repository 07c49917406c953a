"""kvxfer for vLLM: ``KVXferConnector``, loaded by module path or, through vLLM's plugin entry point, by name alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvxfer_vllm.connector import KVXferConnector

__all__ = ["KVXferConnector", "register"]

NAME = "KVXferConnector"


def register() -> None:
    """Register the connector with vLLM by name; vLLM calls this in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvxfer_vllm.connector", NAME)


def __getattr__(name: str) -> Any:
    """Import vLLM only when the connector is asked for, so that the demo and the CLI need not."""
    if name == NAME:
        from kvxfer_vllm.connector import KVXferConnector

        return KVXferConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
