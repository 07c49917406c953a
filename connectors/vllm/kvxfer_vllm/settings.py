"""What vLLM's configuration means to kvxfer: settings, model identity, and what is refused by name at start."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.schedule import Group
from kvxfer_vllm import recurrent
from kvxfer_vllm.migration import check_hosts, translate

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["groups_of", "model_identity", "settings_of", "windows_of"]

log = logging.getLogger("kvxfer.vllm")

_FULL = {"FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec"}
_WINDOW = {"SlidingWindowSpec", "SlidingWindowMLASpec"}


def settings_of(vllm_config: VllmConfig) -> Config:
    """The user's ``kv_connector_extra_config``, checked. Raises ``ConfigError``."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError("kvxfer needs a kv_transfer_config")
    mapping, notes = translate(transfer.kv_connector_extra_config or {}, transfer)
    for note in notes:
        log.warning("configuration of P2pNcclConnector: %s", note)
    config = Config.from_mapping(mapping)
    check_hosts(config.legacy_hosts)
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise ConfigError("kvxfer does not support decode context parallelism: set decode_context_parallel_size to 1")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ConfigError("kvxfer does not support prefill context parallelism: set prefill_context_parallel_size to 1")
    if getattr(model, "is_encoder_decoder", False):
        raise ConfigError("kvxfer does not support encoder-decoder models: it does not move cross-attention caches")
    return config


def groups_of(kv_cache_config: KVCacheConfig) -> tuple[Group, ...]:
    """The engine's KV-cache groups as the schedule knows them. Raises ``ConfigError`` for unsupported kinds."""
    out = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        specs = layer_specs(spec)
        names = {type(s).__name__ for s in specs}
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise ConfigError(f"kvxfer does not support KV-cache group {i} ({', '.join(names)}): it must stay local")
        if names <= _FULL:
            out.append(Group("full", spec.block_size))
        elif names <= _WINDOW:
            out.append(Group("window", spec.block_size))
        elif all(map(recurrent.is_state, specs)):
            recurrent.check_spec(i, specs[0])
            out.append(Group("state", spec.block_size))
        else:
            raise ConfigError(f"kvxfer does not support KV-cache group {i}: it holds {', '.join(sorted(names))}")
    return tuple(out)


def windows_of(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """For each group how many tokens a token attends to, itself included; 0 for all."""
    return tuple(
        max(int(getattr(spec, "sliding_window", None) or 0) for spec in layer_specs(group.kv_cache_spec))
        for group in kv_cache_config.kv_cache_groups
    )


def layer_specs(spec: Any) -> list[Any]:
    """The specs of a group's layers; a uniform group holds one for all."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if per_layer is not None else [spec]


def model_identity(vllm_config: VllmConfig) -> str:
    """A text that two engines share only if they serve the same model: its architecture and shape, not its path."""
    model = vllm_config.model_config
    shape = model.hf_config.to_dict()
    for key in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures_path"):
        shape.pop(key, None)
    text = json.dumps(shape, sort_keys=True, default=str)
    shape_hash = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return f"{shape_hash}/{model.dtype}/{model.quantization or ''}"
