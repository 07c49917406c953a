"""Tiny models of other kinds than Llama, of random weights by which greedy output depends on the whole prompt within reach.

Gemma 2: layers with a sliding window beside layers with full attention. LFM 2 and Nemotron H: layers with a recurrent state (a
short convolution, Mamba 2) beside layers with full attention. DeepSeek V2 without experts: multi-head latent attention (MLA).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from kvxfer_vllm.demo.model import LAYERS, SPREAD, VOCAB, write_model

Weights = dict[str, np.ndarray]

EXACT_POSITIONS = ["--compilation-config", '{"custom_ops": ["all", "-rotary_embedding"]}']
"""Server flags that have torch rotate queries and keys. The operator of vLLM 0.32 for CPUs takes the heads of a three-dimensional
tensor for tokens, which LFM 2 and DeepSeek V2 give it: what attention computes then depends on how many heads a rank holds, or how
many tokens a step has, and so do the tokens that come out, on servers without any connector."""

LATENTS = ["--attention-backend", "CPU_MLA"]
"""Server flags for latents. On a processor with AMX vLLM prefers an attention back end of its own, which is for bfloat16 alone."""

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 2, 32
WINDOW = 64
"""Tokens; two blocks of 32."""
TAPS = 3
"""Tokens that a short convolution sees."""
MAMBA, STATE = "M*M-", 16
"""The layers of ``write_mamba``, as Nemotron H writes them, and the width of a head's state."""

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
    write(folder, config, _window_weights)


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
    write(folder, config, _recurrent_weights)


def write(folder: Path, config: dict[str, Any], weights: Callable[[np.random.Generator], Weights]) -> None:
    write_model(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **_SHAPE, **config}, indent=1))
    save_file(weights(np.random.default_rng(0)), folder / "model.safetensors", metadata={"format": "pt"})


def linear(rng: np.random.Generator, rows: int, *columns: int) -> np.ndarray:
    return rng.normal(0.0, SPREAD, (rows, *columns)).astype(np.float32)


def norm(scale: float, size: int = HIDDEN) -> np.ndarray:
    return np.full(size, scale, np.float32)


def _window_weights(rng: np.random.Generator) -> Weights:
    one = 1  # Gemma adds it to the weights of its norms
    weights = {"model.embed_tokens.weight": linear(rng, VOCAB, HIDDEN), "model.norm.weight": norm(1 - one)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": linear(rng, HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": linear(rng, HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": linear(rng, HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": norm(1 - one),
            f"{layer}.pre_feedforward_layernorm.weight": norm(1 - one),
            # Louder than the embedding, which the tied head would otherwise just repeat.
            f"{layer}.post_attention_layernorm.weight": norm(6 - one),
            f"{layer}.post_feedforward_layernorm.weight": norm(3 - one),
        }
    return weights


def _recurrent_weights(rng: np.random.Generator) -> Weights:
    weights = {"model.embed_tokens.weight": linear(rng, VOCAB, HIDDEN), "model.embedding_norm.weight": norm(1)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.operator_norm.weight": norm(6),
            f"{layer}.ffn_norm.weight": norm(3),
            f"{layer}.feed_forward.w1.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.feed_forward.w3.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.feed_forward.w2.weight": linear(rng, HIDDEN, INTERMEDIATE),
        }
        if i % 2:
            weights |= {
                f"{layer}.self_attn.q_proj.weight": linear(rng, HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.k_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.out_proj.weight": linear(rng, HIDDEN, HEADS * HEAD_DIM),
                f"{layer}.self_attn.q_layernorm.weight": norm(2, HEAD_DIM),
                f"{layer}.self_attn.k_layernorm.weight": norm(2, HEAD_DIM),
            }
        else:
            weights |= {
                f"{layer}.conv.in_proj.weight": linear(rng, 3 * HIDDEN, HIDDEN),
                f"{layer}.conv.conv.weight": 4 * linear(rng, HIDDEN, 1, TAPS),
                f"{layer}.conv.out_proj.weight": linear(rng, HIDDEN, HIDDEN),
            }
    return weights


def write_mamba(folder: Path, groups: int = 1) -> None:
    """Nemotron H: Mamba 2, attention without positions, and a dense layer. Of one group of B and C all ranks hold replicas."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": MAMBA,
        "num_hidden_layers": len(MAMBA),
        "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2",
        "ssm_state_size": STATE,
        "mamba_num_heads": HEADS,
        "mamba_head_dim": HEAD_DIM,
        "mamba_hidden_act": "silu",
        "n_groups": groups,
        "conv_kernel": TAPS,
        "chunk_size": 128,
        "use_conv_bias": True,
        "tie_word_embeddings": False,
    }
    write(folder, config, partial(_mamba_weights, groups=groups))


def _mamba_weights(rng: np.random.Generator, groups: int) -> Weights:
    inner = HEADS * HEAD_DIM
    channels = inner + 2 * groups * STATE
    weights = {
        "backbone.embeddings.weight": linear(rng, VOCAB, HIDDEN),
        "backbone.norm_f.weight": norm(1),
        "lm_head.weight": linear(rng, VOCAB, HIDDEN),
    }
    for i, kind in enumerate(MAMBA):
        layer = f"backbone.layers.{i}"
        weights[f"{layer}.norm.weight"] = norm(1)
        if kind == "M":
            weights |= {
                f"{layer}.mixer.in_proj.weight": linear(rng, inner + channels + HEADS, HIDDEN),
                f"{layer}.mixer.conv1d.weight": 4 * linear(rng, channels, 1, TAPS),
                f"{layer}.mixer.conv1d.bias": linear(rng, channels),
                f"{layer}.mixer.A_log": np.linspace(-4, -1, HEADS, dtype=np.float32),  # forgets in 3 to 50 tokens
                f"{layer}.mixer.D": norm(1, HEADS),
                f"{layer}.mixer.dt_bias": linear(rng, HEADS),
                f"{layer}.mixer.norm.weight": norm(1, inner),
                f"{layer}.mixer.out_proj.weight": linear(rng, HIDDEN, inner),
            }
        elif kind == "*":
            weights |= {
                f"{layer}.mixer.q_proj.weight": 2 * linear(rng, HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.mixer.k_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.mixer.v_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.mixer.o_proj.weight": linear(rng, HIDDEN, HEADS * HEAD_DIM),
            }
        else:
            weights |= {
                f"{layer}.mixer.up_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
                f"{layer}.mixer.down_proj.weight": linear(rng, HIDDEN, INTERMEDIATE),
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
    write(folder, config, _unlike_weights)


def _unlike_weights(rng: np.random.Generator) -> Weights:
    weights = {
        "model.embed_tokens.weight": linear(rng, VOCAB, HIDDEN),
        "model.norm.weight": norm(1),
        "lm_head.weight": linear(rng, VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer, heads = f"model.layers.{i}", KV_HEADS * (1 if i % 2 else 2)
        weights |= {
            f"{layer}.self_attn.q_proj.weight": linear(rng, HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": linear(rng, heads * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": linear(rng, heads * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": linear(rng, HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": linear(rng, HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": norm(1),
            f"{layer}.post_attention_layernorm.weight": norm(1),
        }
    return weights


LATENT, ROTATED, UNROTATED = 512, 64, 128
"""Of ``write_mla``: what a token's KV is compressed to, and the parts of a head's query and key that positions rotate and do not.
Kernels for MLA are made for the first two as DeepSeek has them."""

MLA = {
    "num_key_value_heads": HEADS,
    "head_dim": ROTATED,
    "q_lora_rank": None,
    "kv_lora_rank": LATENT,
    "qk_rope_head_dim": ROTATED,
    "qk_nope_head_dim": UNROTATED,
    "v_head_dim": UNROTATED,
}
"""The configuration of latents, which several models share."""


def write_mla(folder: Path) -> None:
    """DeepSeek V2, likewise."""
    config = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        **MLA,
        "first_k_dense_replace": LAYERS,
        "tie_word_embeddings": False,
    }
    write(folder, config, _latent_weights)


def _latent_weights(rng: np.random.Generator) -> Weights:
    weights = {
        "model.embed_tokens.weight": linear(rng, VOCAB, HIDDEN),
        "model.norm.weight": norm(1),
        "lm_head.weight": linear(rng, VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            # Sharp attention, and louder than the embedding: few tokens decide what comes next, wherever they stand.
            f"{layer}.self_attn.q_proj.weight": 3 * linear(rng, HEADS * (UNROTATED + ROTATED), HIDDEN),
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": linear(rng, LATENT + ROTATED, HIDDEN),
            f"{layer}.self_attn.kv_a_layernorm.weight": norm(1, LATENT),
            f"{layer}.self_attn.kv_b_proj.weight": linear(rng, HEADS * 2 * UNROTATED, LATENT),
            f"{layer}.self_attn.o_proj.weight": 3 * linear(rng, HIDDEN, HEADS * UNROTATED),
            f"{layer}.mlp.gate_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": linear(rng, INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": linear(rng, HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": norm(1),
            f"{layer}.post_attention_layernorm.weight": norm(1),
        }
    return weights
