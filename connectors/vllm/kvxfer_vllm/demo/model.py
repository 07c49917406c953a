"""A model small enough to write to disk in an instant, whose output still depends on every byte of its KV cache.

Random weights with the usual spread (0.02) produce one repeated token whatever the cache holds, which would
hide a corrupted transfer. With 0.12, greedy output depends on the whole prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, MAX_LEN = 4, 256, 512, 8, 4, 512, 2048
HEAD_DIM = HIDDEN // HEADS
SPREAD = 0.12


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama, and the dtype of its weights and KV."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    max_len: int
    dtype: str

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * {"float32": 4, "bfloat16": 2}[self.dtype]


TINY = Shape(LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, VOCAB, MAX_LEN, "float32")
SHAPES = {"tiny": TINY, "llama-3-8b": Shape(32, 4096, 14336, 32, 8, 128256, 131072, "bfloat16")}


def write_model(folder: Path, seed: int = 0) -> None:
    """Write config, weights (float32) and a byte-level tokenizer: one token for each byte of a prompt."""
    write_shape(folder, TINY)
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})


def write_shape(folder: Path, shape: Shape) -> None:
    """Write the config and the tokenizer of a model without weights, which vLLM makes up by ``--load-format dummy``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_len,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": SPREAD,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": shape.dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape.max_len}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def linear(rows: int, columns: int) -> np.ndarray:
        return rng.normal(0.0, SPREAD, (rows, columns)).astype(np.float32)

    ones = np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": linear(VOCAB, HIDDEN),
        "model.norm.weight": ones,
        "lm_head.weight": linear(VOCAB, HIDDEN),
    }
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
            f"{layer}.input_layernorm.weight": ones,
            f"{layer}.post_attention_layernorm.weight": ones,
        }
    return weights
