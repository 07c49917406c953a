"""Tiny models whose recurrent layers are neither short convolutions nor Mamba 2, beside layers with full attention.

Qwen 3 Next: gated delta nets, with experts in its last layer. Jamba: Mamba 1. Kimi Linear: Kimi's delta attention, beside MLA.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvxfer_vllm.demo.model import LAYERS, VOCAB
from tests.e2e.models import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LATENT,
    MLA,
    ROTATED,
    UNROTATED,
    Weights,
    linear,
    norm,
    write,
)

TAPS = 4
"""Tokens that a convolution sees; the kernels of gated delta nets for CPUs are made for that many."""
KEYS, VALUES, WIDTH = 2, 4, 32
"""Heads of keys and of values in a gated delta net, and the width of each."""
ALIGNED = 64
"""Tokens of a block by which vLLM makes a block of attention as large as a state of a gated delta net or of Mamba 1."""
EXPERTS = 4
INNER, STATE, STEPS = 2 * HIDDEN, 16, 8
"""Of Mamba 1: its channels, the width of each one's state, and the rank of its time steps."""


def write_delta_net(folder: Path) -> None:
    """Qwen 3 Next."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        "linear_num_key_heads": KEYS,
        "linear_num_value_heads": VALUES,
        "linear_key_head_dim": WIDTH,
        "linear_value_head_dim": WIDTH,
        "linear_conv_kernel_dim": TAPS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": HIDDEN,
        "shared_expert_intermediate_size": HIDDEN,
        "mlp_only_layers": list(range(LAYERS - 1)),
        "tie_word_embeddings": False,
    }
    write(folder, config, _delta_net_weights)


def _delta_net_weights(rng: np.random.Generator) -> Weights:
    one = 1  # Qwen 3 Next adds it to the weights of its norms
    weights = _ends(rng, "model.norm", 1 - one)
    keys, values = KEYS * WIDTH, VALUES * WIDTH
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {f"{layer}.{which}_layernorm.weight": norm(1 - one) for which in ("input", "post_attention")}
        if i % 2:
            weights |= {
                f"{layer}.self_attn.q_proj.weight": linear(rng, 2 * HEADS * HEAD_DIM, HIDDEN),  # with gates
                f"{layer}.self_attn.k_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.o_proj.weight": linear(rng, HIDDEN, HEADS * HEAD_DIM),
                f"{layer}.self_attn.q_norm.weight": norm(2 - one, HEAD_DIM),
                f"{layer}.self_attn.k_norm.weight": norm(2 - one, HEAD_DIM),
            }
        else:
            weights |= {
                f"{layer}.linear_attn.in_proj_qkvz.weight": linear(rng, 2 * keys + 2 * values, HIDDEN),
                f"{layer}.linear_attn.in_proj_ba.weight": linear(rng, 2 * VALUES, HIDDEN),
                f"{layer}.linear_attn.conv1d.weight": 4 * linear(rng, 2 * keys + values, 1, TAPS),
                f"{layer}.linear_attn.A_log": np.linspace(-4, -1, VALUES, dtype=np.float32),
                f"{layer}.linear_attn.dt_bias": linear(rng, VALUES),
                f"{layer}.linear_attn.norm.weight": norm(1, WIDTH),
                f"{layer}.linear_attn.out_proj.weight": linear(rng, HIDDEN, values),
            }
        weights |= _experts(rng, f"{layer}.mlp") if i == LAYERS - 1 else _dense(rng, f"{layer}.mlp", INTERMEDIATE)
    return weights


def _experts(rng: np.random.Generator, at: str) -> Weights:
    weights = {
        f"{at}.gate.weight": linear(rng, EXPERTS, HIDDEN),
        f"{at}.shared_expert_gate.weight": linear(rng, 1, HIDDEN),
        **_dense(rng, f"{at}.shared_expert", HIDDEN),
    }
    for n in range(EXPERTS):
        weights |= _dense(rng, f"{at}.experts.{n}", HIDDEN)
    return weights


def _dense(rng: np.random.Generator, at: str, width: int) -> Weights:
    return {
        f"{at}.gate_proj.weight": linear(rng, width, HIDDEN),
        f"{at}.up_proj.weight": linear(rng, width, HIDDEN),
        f"{at}.down_proj.weight": linear(rng, HIDDEN, width),
    }


def _ends(rng: np.random.Generator, last: str, scale: float) -> Weights:
    return {
        "model.embed_tokens.weight": linear(rng, VOCAB, HIDDEN),
        f"{last}.weight": norm(scale),
        "lm_head.weight": linear(rng, VOCAB, HIDDEN),
    }


def write_mamba_1(folder: Path) -> None:
    """Jamba without experts."""
    config = {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "num_experts": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": STATE,
        "mamba_d_conv": TAPS,
        "mamba_expand": INNER // HIDDEN,
        "mamba_dt_rank": STEPS,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "tie_word_embeddings": False,
    }
    write(folder, config, _mamba_1_weights)


def _mamba_1_weights(rng: np.random.Generator) -> Weights:
    weights = _ends(rng, "model.final_layernorm", 1)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {f"{layer}.{which}_layernorm.weight": norm(1) for which in ("input", "pre_ff")}
        weights |= _dense(rng, f"{layer}.feed_forward", INTERMEDIATE)
        if i % 2:
            weights |= {
                f"{layer}.self_attn.q_proj.weight": 2 * linear(rng, HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.k_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.v_proj.weight": linear(rng, KV_HEADS * HEAD_DIM, HIDDEN),
                f"{layer}.self_attn.o_proj.weight": linear(rng, HIDDEN, HEADS * HEAD_DIM),
            }
        else:
            weights |= {
                f"{layer}.mamba.in_proj.weight": linear(rng, 2 * INNER, HIDDEN),
                f"{layer}.mamba.conv1d.weight": 4 * linear(rng, INNER, 1, TAPS),
                f"{layer}.mamba.conv1d.bias": linear(rng, INNER),
                f"{layer}.mamba.x_proj.weight": linear(rng, STEPS + 2 * STATE, INNER),
                f"{layer}.mamba.dt_proj.weight": linear(rng, INNER, STEPS),
                f"{layer}.mamba.dt_proj.bias": linear(rng, INNER),
                f"{layer}.mamba.A_log": np.tile(np.linspace(-4, -1, STATE, dtype=np.float32), (INNER, 1)),
                f"{layer}.mamba.D": norm(1, INNER),
                f"{layer}.mamba.dt_layernorm.weight": norm(1, STEPS),
                f"{layer}.mamba.b_layernorm.weight": norm(1, STATE),
                f"{layer}.mamba.c_layernorm.weight": norm(1, STATE),
                f"{layer}.mamba.out_proj.weight": linear(rng, HIDDEN, INNER),
            }
    return weights


def write_delta_attention(folder: Path) -> None:
    """Kimi Linear without experts."""
    config = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        **MLA,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [n for n in range(1, LAYERS + 1) if n % 2],  # counted from one
            "full_attn_layers": [n for n in range(1, LAYERS + 1) if not n % 2],
            "num_heads": HEADS,
            "head_dim": WIDTH,
            "short_conv_kernel_size": TAPS,
        },
        "tie_word_embeddings": False,
    }
    write(folder, config, _delta_attention_weights)


def _delta_attention_weights(rng: np.random.Generator) -> Weights:
    weights = _ends(rng, "model.norm", 1)
    inner = HEADS * WIDTH
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        at = f"{layer}.self_attn"
        weights |= {f"{layer}.{which}_layernorm.weight": norm(1) for which in ("input", "post_attention")}
        weights |= _dense(rng, f"{layer}.mlp", INTERMEDIATE)
        if i % 2:
            weights |= {
                f"{at}.q_proj.weight": 3 * linear(rng, HEADS * (UNROTATED + ROTATED), HIDDEN),
                f"{at}.kv_a_proj_with_mqa.weight": linear(rng, LATENT + ROTATED, HIDDEN),
                f"{at}.kv_a_layernorm.weight": norm(1, LATENT),
                f"{at}.kv_b_proj.weight": linear(rng, HEADS * 2 * UNROTATED, LATENT),
                f"{at}.o_proj.weight": linear(rng, HIDDEN, HEADS * UNROTATED),
            }
        else:
            weights |= {f"{at}.{x}_proj.weight": linear(rng, inner, HIDDEN) for x in "qkv"}
            weights |= {f"{at}.{x}_conv1d.weight": 4 * linear(rng, inner, 1, TAPS) for x in "qkv"}
            weights |= {
                f"{at}.A_log": np.linspace(-4, -1, HEADS, dtype=np.float32).reshape(1, 1, HEADS, 1),
                f"{at}.dt_bias": linear(rng, inner),
                f"{at}.b_proj.weight": linear(rng, HEADS, HIDDEN),
                f"{at}.f_a_proj.weight": linear(rng, WIDTH, HIDDEN),
                f"{at}.f_b_proj.weight": linear(rng, inner, WIDTH),
                f"{at}.g_a_proj.weight": linear(rng, WIDTH, HIDDEN),
                f"{at}.g_b_proj.weight": linear(rng, inner, WIDTH),
                f"{at}.o_norm.weight": norm(1, WIDTH),
                f"{at}.o_proj.weight": linear(rng, HIDDEN, inner),
            }
    return weights
