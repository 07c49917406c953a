"""Compare the description of a cache with vLLM's own writes before it is used, see ``kvxfer.memory.proof``."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache
from kvxfer.logs import logger
from kvxfer.memory.proof import Proof, Unproven, Write
from kvxfer_vllm.pages import INDEXER_SCALED

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

__all__ = ["check_layout"]

log = logger("kvxfer.vllm")


def check_layout(cache: Cache, tensors: dict[str, torch.Tensor], config: VllmConfig) -> None:
    """Compare the description with where each layer's own kernel writes, and log what was compared.

    Call it from ``register_kv_caches``, when layers and tensors are bound and no block is in use: it writes to some blocks,
    and restores them.

    Raises:
        ConfigError: A layer does not write where the description says.
    """
    import torch

    began = time.perf_counter()
    proof, checked, unchecked = Proof(cache), 0, Counter[str]()
    model: dict[str, Any] = config.compilation_config.static_forward_context
    with torch.inference_mode():
        for name in dict.fromkeys(name for view in cache.views for name in view.layers):
            layer = model.get(name)
            kind = type(layer).__name__ if layer is not None else "layer that the model does not name"
            try:
                found = proof.difference(name, tensors[name], _write(layer, model, config.model_config.dtype))
            except Unproven as e:
                unchecked[f"{kind} ({e})"] += 1
                continue
            if found is not None:
                raise ConfigError(
                    f"layer {name!r} ({kind}) does not write its KV cache as kvxfer would move it: {found}. Requests would "
                    "be answered from wrong KV. Please report this with the model and the version of vLLM; "
                    'kvxfer\'s setting "layout_check": false starts the engine anyway'
                )
            checked += 1
    missed = "".join(f"; not checked: {n} x {kind}" for kind, n in unchecked.items())
    log.info(
        "%d of %d layers write their KV cache as described, found in %.0f ms%s",
        checked,
        checked + unchecked.total(),
        1000 * (time.perf_counter() - began),
        missed,
    )


def _write(layer: Any, model: dict[str, Any], dtype: torch.dtype) -> Write:
    """Return a layer's own write.

    Raises:
        Unproven: None can be called outside of a forward pass.
    """
    if getattr(layer, "kv_sharing_target_layer_name", None):
        layer = model[layer.kv_sharing_target_layer_name]  # it has no cache of its own, and reads what that one writes
    if type(layer).__name__ == "DeepseekV32IndexerCache":
        return _of_indexer(layer, dtype)
    update = getattr(getattr(layer, "impl", None), "do_kv_cache_update", None)
    backend = layer.get_attn_backend() if update is not None else None
    if update is None or backend is None or getattr(layer, "hisparse_cache", None) is not None:
        raise Unproven("it has no write that can be called by itself")
    if backend.is_mla():
        inputs = {"kv_c": (layer.kv_lora_rank,), "k_pe": (1, layer.qk_rope_head_dim)}
        return Write(inputs, dtype, partial(_mla, layer))
    if backend.forward_includes_kv_cache_update:
        raise Unproven("it writes within its forward pass")
    inputs = {"k": (layer.num_kv_heads, layer.head_size), "v": (layer.num_kv_heads, layer.head_size_v)}
    return Write(inputs, dtype, lambda kv, slots: update(layer, *kv, layer.kv_cache, slots))


def _mla(layer: Any, kv: Any, slots: Any) -> None:
    latent, rope = kv
    layer.impl.do_kv_cache_update(latent, rope, layer.kv_cache, slots, layer.kv_cache_dtype, layer._k_scale)


def _of_indexer(layer: Any, dtype: torch.dtype) -> Write:
    """Return the write of a sparse indexer's keys, fp8 with fp32 scales, as vLLM's unfused kernels do it."""
    from vllm import _custom_ops as ops

    size, rest = divmod(layer.head_dim * INDEXER_SCALED, INDEXER_SCALED + 4)
    if rest or layer.uses_shuffled_layout:
        raise Unproven("it is not of fp8 with a scale for each 128 elements, in rows")

    def call(keys: Any, slots: Any) -> None:
        ops.indexer_k_quant_and_cache(keys[0], layer.kv_cache, slots, INDEXER_SCALED, "ue8m0")

    return Write({"index": (size,)}, dtype, call)
