"""What encloses a connector: vLLM's ``MultiConnector``, which gives each of several connectors a configuration of its own.

A child gets a copy of the engine's configuration, with its own entry in the place of ``kv_transfer_config``. vLLM itself goes by
the engine's: for what it does after a failed load, and for when it frees blocks. It hands that to no child, so it is looked for in the
calls that lead here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvxfer.errors import ConfigError
from kvxfer.logs import logger
from kvxfer_vllm.migration import ConnectorConfig

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

__all__ = ["check_enclosure", "enclosed", "engine_transfer", "loads_safely", "together"]

log = logger("kvxfer.vllm")

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


def check_enclosure(vllm_config: VllmConfig) -> None:
    """Check what a ``MultiConnector`` around this connector is told; warn of settings of kvxfer's that vLLM gives to no connector.

    Raises:
        ConfigError: kvxfer stands in it twice.
    """
    kinds = [kind for kind in together(vllm_config) if _is_ours(kind)]
    if len(kinds) > 1:
        raise ConfigError(
            f"kvxfer stands {len(kinds)} times in 'connectors' of MultiConnector, and an engine can have it once: remove all but one entry"
        )
    if not kinds:
        return
    astray = sorted(
        engine_transfer(vllm_config).kv_connector_extra_config.keys() & set(ConnectorConfig.__struct_fields__)
    )
    if astray:
        log.warning(
            "kv_connector_extra_config of MultiConnector has %s, which vLLM gives to no connector: move it into kv_connector_extra_config "
            "of kvxfer's entry in 'connectors'",
            ", ".join(astray),
        )


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


def enclosed(config: ConnectorConfig, vllm_config: VllmConfig) -> ConnectorConfig:
    """Return the settings of a scheduler side, as they are where it stands; warn of what its operator may not expect there."""
    own, engine = vllm_config.kv_transfer_config, engine_transfer(vllm_config)
    if own is None or not own.is_kv_consumer:
        return config
    if not engine.is_kv_consumer:
        log.warning(
            "this engine loads nothing: kv_role of its MultiConnector is %s, so vLLM gives blocks away that a step still writes to; set "
            "it to kv_both",
            engine.kv_role,
        )
        return config
    if getattr(engine, "kv_load_failure_policy", None) == "fail":
        log.warning(
            "kv_load_failure_policy is 'fail', vLLM's default: a load that fails ends its request with an error (HTTP 500); with "
            "'recompute' this engine computes the prompt instead. Set it in --kv-transfer-config itself: vLLM ignores that of an entry "
            "inside MultiConnector"
        )
    before = [kind.__name__ for kind in itertools.takewhile(lambda kind: not _is_ours(kind), together(vllm_config))]
    if not before:
        return config
    log.warning(
        "MultiConnector asks %s before kvxfer: if it has any tokens of a prompt, vLLM loads those and computes the rest. Put kvxfer first "
        "in 'connectors'",
        ", ".join(before),
    )
    # What is fetched before vLLM says whom it loads from may be fetched in vain.
    return msgspec.structs.replace(config, step_budget=0.0)


def _is_ours(kind: type) -> bool:
    return any(base.__module__.partition(".")[0] == "kvxfer_vllm" for base in kind.__mro__)


def _inside(transfer: KVTransferConfig) -> Iterator[type]:
    for entry in transfer.kv_connector_extra_config.get("connectors", ()):
        child = type(transfer)(**entry)
        if child.kv_connector == "MultiConnector":
            yield from _inside(child)
        else:
            yield KVConnectorFactory.get_connector_class(child)
