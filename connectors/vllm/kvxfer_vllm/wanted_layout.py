"""The memory layout that vLLM is asked for: one in which nothing need be packed before it is moved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvxfer_vllm.enclosing import engine_transfer

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["BLOCKS_OUTERMOST", "wanted_layout"]

BLOCKS_OUTERMOST = "BLHNC"
"""All layers of a block lie side by side, so that a block is one run; within a layer each head's tokens do, so that ranks which hold some
of the heads have runs, too."""


def wanted_layout(vllm_config: VllmConfig) -> str | None:
    """Return the layout to ask vLLM for; None if it is to choose.

    vLLM treats this as a preference. ``VLLM_KV_CACHE_LAYOUT`` takes precedence. An attention back end that does not have the layout gets
    another one, with a warning of vLLM's. So nothing is asked for where that is certain, or where the layout has not been tried:

    - on other devices than CUDA: CPU attention has one layout, and those of ROCm have their own order;
    - of models with latent attention or recurrent states, whose pages vLLM packs in ways of its own;
    - under kvcached, which lays the cache out itself;
    - inside ``MultiConnector``, which refuses to start if two connectors ask for different layouts.
    """
    model: Any = vllm_config.model_config
    if model is None or getattr(model, "use_mla", True) or getattr(model, "is_hybrid", True):
        return None
    if engine_transfer(vllm_config) is not vllm_config.kv_transfer_config:
        return None
    if os.environ.get("ENABLE_KVCACHED", "").lower() in ("1", "true"):
        return None
    return BLOCKS_OUTERMOST if _on_cuda() else None


def _on_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())
