"""What the bytes of a cache depend on beside its layout: dtypes and their names."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import get_kv_quant_mode

from kvxfer.geometry import Incompatible
from tests.vllm.sides import Layer, Side, engine, load
from tests.vllm.writers import attention, gpu


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 9)


NAMES = [
    "float16",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "int4_per_token_head",
]
DTYPES = ["auto", *(name for name in NAMES if name in STR_DTYPE_TO_TORCH_DTYPE)]


@functools.cache
def stored(cache_dtype: str) -> list[Side]:
    """An engine that was asked for this cache dtype."""
    dtype = STR_DTYPE_TO_TORCH_DTYPE.get(cache_dtype, torch.bfloat16)
    plain = attention(2, by=TritonAttentionBackend, dtype=dtype, kv_quant_mode=get_kv_quant_mode(cache_dtype))
    layer = Layer(plain.spec, plain.write, plain.backend, {"kv_cache_dtype": cache_dtype})
    return engine({"model.layers.0.attn": layer}, 32)


@pytest.mark.parametrize(("one", "other"), [(a, b) for i, a in enumerate(DTYPES) for b in DTYPES[i + 1 :]])
def test_caches_of_other_dtypes_are_refused_by_name(one: str, other: str) -> None:
    for p, d in ((one, other), (other, one)):
        with pytest.raises(Incompatible, match="^encoding|^plane") as refused:
            load(stored(p), stored(d), [1], [1], 0, 32)
        if {one, other} == {"fp8_e4m3", "fp8_e5m2"}:
            assert re.search("float8_e4m3fn", str(refused.value)) and re.search("float8_e5m2", str(refused.value))


@pytest.mark.parametrize(("one", "other"), [("fp8", "fp8_e4m3"), ("auto", "bfloat16")])
def test_names_of_one_dtype_are_one(one: str, other: str) -> None:
    load(stored(one), stored(other), [1], [1], 0, 32)


def test_a_layer_that_is_left_out_of_quantisation_says_so_itself() -> None:
    layer = {"model.layers.0.attn": attention(2)}
    load(engine(layer, 32, cache_dtype="fp8_e4m3"), engine(layer, 32, cache_dtype="auto"), [1], [1], 0, 32)
