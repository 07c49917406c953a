"""Tiny models with two KV-cache groups, of random weights by which greedy output depends on the whole prompt within reach.

Gemma 2: layers with a sliding window beside layers with full attention. LFM 2: layers with a recurrent state (a short
convolution) beside layers with full attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvxfer_vllm.demo.model import LAYERS, SPREAD, VOCAB, write_model

Weights = dict[str, np.ndarray]

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 2, 32
WINDOW = 64
"""Tokens; two blocks of 32."""
TAPS = 3
"""Tokens that a short convolution sees."""

_SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
"""What differs from the model that ``write_model`` writes."""


def write_window(folder: Path) -> None:
    """Gemma 2, in the form that vLLM loads, with the tokenizer of ``write_model``."""
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,  # sharp attention: with the usual HEAD_DIM output is one token repeated
        "rms_norm_eps": 1e-6,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }
    _write(folder, config, _window_weights)


def write_recurrent(folder: Path) -> None:
    """LFM 2, likewise."""
    config = {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "norm_eps": 1e-5,
        "conv_L_cache": TAPS,
        "conv_bias": False,
        "conv_dim": HIDDEN,
        "block_dim": HIDDEN,
        "block_auto_adjust_ff_dim": False,
        "block_multiple_of": 1,
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
    }
    _write(folder, config, _recurrent_weights)


def _write(folder: Path, config: dict[str, Any], weights: Callable[[np.random.Generator], Weights]) -> None:
    write_model(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **_SHAPE, **config}, indent=1))
    save_file(weights(np.random.default_rng(0)), folder / "model.safetensors", metadata={"format": "pt"})


def _linear(rng: np.random.Generator, rows: int, *columns: int) -> np.ndarray:
    return rng.normal(0.0, SPREAD, (rows, *columns)).astype(np.float32)


def _norm(scale: float, size: int = HIDDEN) -> np.ndarray:
    return np.full(size, scale, np.float32)


def _window_weights(rng: np.random.Generator) -> Weights:
    one = 1  # Gemma adds it to the weights of its norms
    weights = {"model.embed_tokens.weight": _linear(rng, VOCAB, HIDDEN), "model.norm.weight": _norm(1 - one)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": _linear(rng, HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": _linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": _linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": _linear(rng, HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": _linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": _linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": _linear(rng, HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": _norm(1 - one),
            f"{layer}.pre_feedforward_layernorm.weight": _norm(1 - one),
            # Louder than the embedding, which the tied head would otherwise just repeat.
            f"{layer}.post_attention_layernorm.weight": _norm(6 - one),
            f"{layer}.post_feedforward_layernorm.weight": _norm(3 - one),
        }
    return weights


def _recurrent_weights(rng: np.random.Generator) -> Weights:
    weights = {"model.embed_tokens.weight": _linear(rng, VOCAB, HIDDEN), "model.embedding_norm.weight": _norm(1)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.operator_norm.weight": _norm(6),
            f"{layer}.ffn_norm.weight": _norm(3),
            f"{layer}.feed_forward.w1.weight": _linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.feed_forward.w3.weight": _linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.feed_forward.w2.weight": _linear(rng, HIDDEN, INTERMEDIATE),
        }
        if i % 2:
            weights |= {
                f"{layer}.self_attn.q_proj.weight": _linear(rng, HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.k_proj.weight": _linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": _linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.out_proj.weight": _linear(rng, HIDDEN, HEADS * HEAD_DIM),
                f"{layer}.self_attn.q_layernorm.weight": _norm(2, HEAD_DIM),
                f"{layer}.self_attn.k_layernorm.weight": _norm(2, HEAD_DIM),
            }
        else:
            weights |= {
                f"{layer}.conv.in_proj.weight": _linear(rng, 3 * HIDDEN, HIDDEN),
                f"{layer}.conv.conv.weight": 4 * _linear(rng, HIDDEN, 1, TAPS),
                f"{layer}.conv.out_proj.weight": _linear(rng, HIDDEN, HIDDEN),
            }
    return weights


def write_unlike_heads(folder: Path) -> None:
    """MiMo V2 Flash without experts: layers with a sliding window have twice the KV heads of those without."""
    config = {
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "layernorm_epsilon": 1e-5,
        "num_key_value_heads": KV_HEADS,
        "v_head_dim": HEAD_DIM,
        "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": 2 * KV_HEADS,
        "swa_head_dim": HEAD_DIM,
        "swa_v_head_dim": HEAD_DIM,
        "sliding_window": WINDOW,
        "sliding_window_size": WINDOW,
        "hybrid_layer_pattern": [1, 0] * (LAYERS // 2),
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "moe_layer_freq": [0] * LAYERS,
        "mlp_layer_types": ["dense"] * LAYERS,
        "attention_bias": False,
        "attention_value_scale": None,
        "tie_word_embeddings": False,
    }
    _write(folder, config, _unlike_weights)


def _unlike_weights(rng: np.random.Generator) -> Weights:
    weights = {
        "model.embed_tokens.weight": _linear(rng, VOCAB, HIDDEN),
        "model.norm.weight": _norm(1),
        "lm_head.weight": _linear(rng, VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer, heads = f"model.layers.{i}", KV_HEADS * (1 if i % 2 else 2)
        weights |= {
            f"{layer}.self_attn.q_proj.weight": _linear(rng, HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": _linear(rng, heads * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": _linear(rng, heads * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": _linear(rng, HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": _linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": _linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": _linear(rng, HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": _norm(1),
            f"{layer}.post_attention_layernorm.weight": _norm(1),
        }
    return weights
