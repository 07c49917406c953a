"""Layers of vLLM for tests of pages: their specs, and writers that fill their pages with numbers."""

from __future__ import annotations

import functools
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.vllm.sides import Layer

ORDERS = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
DIM = 16
AVX512 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's CPU kernels for such caches need a processor with AVX-512"
)


def gpu(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """What the device is that the caches say to lie on."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major, minor=0))


def heads_of(spec: Any, total: int, rank: int, size: int) -> range:
    """The model's heads that a rank holds, as ``QKVParallelLinear`` gives them out."""
    first = rank * spec.num_kv_heads if size <= total else rank * total // size
    return range(first, first + spec.num_kv_heads)


def numbers(what: str, total: int, positions: np.ndarray, dim: int) -> torch.Tensor:
    """``[tokens, total, dim]`` numbers that no other token, head or plane has."""
    return _drawn(what, total, dim)[torch.from_numpy(positions)]


@functools.cache
def _drawn(what: str, total: int, dim: int) -> torch.Tensor:
    draw = np.random.default_rng(sum(what.encode())).standard_normal((256, total, dim))
    return torch.from_numpy(draw.astype(np.float32))


def make(cls: Any, **given: Any) -> Any:
    """A spec, without what this release's class has no field for."""
    return cls(**{name: value for name, value in given.items() if name in {f.name for f in fields(cls)}})


def split(total: int) -> Any:
    """How many KV heads a rank gets."""
    return lambda size: max(1, total // size)


# --- K and V of each head: reshape_and_cache_flash writes key_cache[block, slot, head], value_cache likewise; the two are
#     [..., :head_size] and [..., head_size:] of the cache (vllm/v1/attention/backends/flash_attn.py, do_kv_cache_update)


def write_kv(total: int) -> Any:
    def write(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
        heads = list(heads_of(spec, total, rank, size))
        key_cache, value_cache = t.transpose(1, 2).split([spec.head_size, spec.head_size_v], dim=-1)
        rows = torch.from_numpy(blocks[positions // t.shape[2]]), torch.from_numpy(positions % t.shape[2])
        key_cache[rows] = numbers("k", total, positions, spec.head_size)[:, heads].to(t.dtype)
        value_cache[rows] = numbers("v", total, positions, spec.head_size_v)[:, heads].to(t.dtype)

    return write


def attention(total: int, cls: Any = FullAttentionSpec, by: Any = FlashAttentionBackend, **more: Any) -> Layer:
    given = {"head_size": DIM, "head_size_v": DIM, "dtype": torch.bfloat16, **more}
    return Layer(
        lambda size, block: make(cls, block_size=block, num_kv_heads=split(total)(size), **given),
        write_kv(total),
        by,
        {"sliding_window": given.get("sliding_window"), "kv_cache_dtype": "auto"},
    )


def gemma4(full: int, sliding: int) -> Any:
    """Layer 0 sliding, layer 1 full."""
    return Gemma4TextConfig(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        num_attention_heads=32,
        num_key_value_heads=sliding,
        num_global_key_value_heads=full,
        attention_k_eq_v=True,
    )


def mimo(full: int, sliding: int) -> Any:
    return {"num_key_value_heads": full, "swa_num_key_value_heads": sliding, "num_attention_heads": 64}


def nas(full: int, sliding: int) -> Any:
    """Layer 0 has ``sliding`` heads, though none of its layers has a window."""
    blocks = [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=32 // n)) for n in (sliding, full)]
    return SimpleNamespace(num_attention_heads=32, block_configs=blocks, to_dict=lambda: {"num_key_value_heads": full})


def hybrid(full: int, sliding: int) -> dict[str, Layer]:
    """One group, as without vLLM's hybrid manager: both kinds of layers keep all blocks."""
    return {
        "model.layers.0.self_attn.attn": attention(sliding, sliding_window=64),
        "model.layers.1.self_attn.attn": attention(full),
    }
