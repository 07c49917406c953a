"""What encloses a connector: vLLM's ``MultiConnector``, which gives each of several connectors a configuration of its own.

A child gets a copy of the engine's configuration, with its own entry in the place of ``kv_transfer_config``. vLLM itself goes by
the engine's: for what it does after a failed load, and for when it frees blocks. It hands that to no child, so it is looked for in the
calls that lead here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

__all__ = ["engine_transfer", "loads_safely", "together"]

_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def engine_transfer(vllm_config: VllmConfig) -> KVTransferConfig:
    """Return the engine's ``kv_transfer_config``: the outermost one. Call it while vLLM makes a connector or its metrics."""
    found: Any = vllm_config.kv_transfer_config
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == _MULTI:
            outer = getattr(frame.f_locals.get("vllm_config"), "kv_transfer_config", None)
            found = found if outer is None else outer
    return found


def loads_safely(vllm_config: VllmConfig) -> bool:
    """Return whether this connector may load: by its own role, and by the engine's.

    vLLM keeps the blocks of a finished request until no step writes to them any more only in an engine that is a consumer.
    """
    return bool(vllm_config.kv_transfer_config.is_kv_consumer and engine_transfer(vllm_config).is_kv_consumer)


def together(vllm_config: VllmConfig) -> Iterator[type]:
    """Yield the classes of all connectors inside the ``MultiConnector`` that makes this one; nothing outside of one."""
    outer = engine_transfer(vllm_config)
    if outer is not vllm_config.kv_transfer_config:
        yield from _inside(outer)


def _inside(transfer: KVTransferConfig) -> Iterator[type]:
    for entry in transfer.kv_connector_extra_config.get("connectors", ()):
        child = type(transfer)(**entry)
        if child.kv_connector == "MultiConnector":
            yield from _inside(child)
        else:
            yield KVConnectorFactory.get_connector_class(child)
