"""Compare the description of a cache with vLLM's own writes before it is used, see ``kvxfer.memory.proof``."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache
from kvxfer.logs import logger
from kvxfer.memory.proof import Proof, Unproven
from kvxfer_vllm.internals import layer_of, write_of

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig

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
    with torch.inference_mode():
        for name in dict.fromkeys(name for view in cache.views for name in view.layers):
            layer = layer_of(config, name)
            kind = "layer that the model does not name" if layer.of is None else type(layer.of).__name__
            try:
                found = proof.difference(name, tensors[name], write_of(layer, config.model_config.dtype))
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
