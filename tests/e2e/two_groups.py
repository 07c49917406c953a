"""A model with two KV-cache groups: layers with a sliding window beside layers with full attention (Gemma 2)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from kvxfer_vllm.demo.model import write_model

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 128, 256, 4, 2, 32, 512
WINDOW = 64
"""Tokens; two blocks of 32."""
SPREAD = 0.12


def write_two_groups(folder: Path, seed: int = 0) -> None:
    """Like `write_model`, whose tokenizer it takes; greedy output depends on the whole prompt within reach."""
    write_model(folder)
    config = {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 1,  # sharp attention: with the usual HEAD_DIM output is one token repeated
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def linear(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, SPREAD, (rows, columns)).astype(np.float32)

    def norm(scale: float) -> np.ndarray:
        return np.full(HIDDEN, scale - 1, np.float32)  # Gemma adds the one

    weights = {"model.embed_tokens.weight": linear(VOCAB, HIDDEN), "model.norm.weight": norm(1)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": linear(HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.k_proj.weight": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": linear(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{layer}.self_attn.o_proj.weight": linear(HIDDEN, HEADS * HEAD_DIM),
            f"{layer}.mlp.gate_proj.weight": linear(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.up_proj.weight": linear(INTERMEDIATE, HIDDEN),
            f"{layer}.mlp.down_proj.weight": linear(HIDDEN, INTERMEDIATE),
            f"{layer}.input_layernorm.weight": norm(1),
            f"{layer}.pre_feedforward_layernorm.weight": norm(1),
            # Louder than the embedding, which the tied head would otherwise just repeat.
            f"{layer}.post_attention_layernorm.weight": norm(6),
            f"{layer}.post_feedforward_layernorm.weight": norm(3),
        }
    return weights
