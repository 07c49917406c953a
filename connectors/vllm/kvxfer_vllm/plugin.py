"""vLLM's plugin entry point, which makes the connector known by name alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvxfer.logs import logger

__all__ = ["NAME", "register"]

log = logger("kvxfer.vllm")

NAME = "KVXferConnector"


def register() -> None:
    """Register the connector with vLLM by name; vLLM calls this in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvxfer_vllm.connector", NAME)
        _warn_if_replaced(sys.argv)


def _warn_if_replaced(command: Sequence[str]) -> None:
    """Warn of a command line by which vLLM puts a store in the place of kvxfer, and says nothing itself."""
    offloads = any(word.replace("_", "-").startswith("--kv-offloading-size") for word in command)
    if offloads and any(NAME in word or "kvxfer_vllm" in word for word in command):
        log.warning(
            "--kv-offloading-size replaces the connector of --kv-transfer-config, so kvxfer is not used: name both in 'connectors' of a "
            "MultiConnector instead"
        )
