"""Models with random weights, small enough to be made in an instant, whose output still depends on every byte of their KV.

Random weights with the usual spread produce one repeated token whatever the cache holds, which would hide a corrupted
transfer. With a wider spread, greedy output depends on the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MODELS", "tiny"]

VOCAB = 512
SPREAD = 0.3
WINDOW = 24

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": SPREAD,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _full() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_COMMON)


def _sliding() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**_COMMON, sliding_window=WINDOW)


def _mixed() -> Any:
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(**_COMMON, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=16)


def _latent() -> Any:
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 8, "head_dim": 8},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    )


MODELS: dict[str, Callable[[], Any]] = {"full": _full, "sliding": _sliding, "mixed": _mixed, "latent": _latent}
"""Configurations by what is special about their attention."""


def tiny(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Return a model of one of ``MODELS`` with random weights, the same wherever it is made."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(MODELS[kind]()).to(dtype).eval()
