"""Scales by which layers quantise their cache: other engines must have the same, or their bytes mean something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode, MLAAttentionSpec

from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Incompatible, Rank, route
from kvxfer_vllm.layout import Layout

BLOCKS, TOKENS, HEADS, SIZE = 6, 32, 2, 16
NAMES = ("layer.0", "layer.1")


def loaded(k: float | list[float], v: float | list[float]) -> torch.nn.Module:
    """A layer as vLLM leaves it once a checkpoint with these scales is loaded."""
    layer = torch.nn.Module()
    layer.kv_cache_dtype = "fp8"
    set_default_quant_scales(layer, register_buffer=True)
    if isinstance(k, list):  # one for each head, by compressed-tensors
        layer._k_scale, layer._v_scale = torch.tensor(k), torch.tensor(v)
        return layer
    method = BaseKVCacheMethod(SimpleNamespace())
    method.create_weights(layer)
    for name, scale in (("k_scale", k), ("v_scale", v)):
        getattr(layer, name).data.fill_(scale)
    method.process_weights_after_loading(layer)
    return layer


def cache(
    layers: dict[str, Any], spec: type = FullAttentionSpec, mode: KVQuantMode = KVQuantMode.FP8_PER_TENSOR
) -> Cache:
    heads = 1 if spec is MLAAttentionSpec else HEADS
    quantised = mode is not KVQuantMode.NONE
    made = spec(
        block_size=TOKENS,
        num_kv_heads=heads,
        head_size=SIZE,
        dtype=torch.uint8 if quantised else torch.bfloat16,
        kv_quant_mode=mode,
    )
    kv = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(list(NAMES), made)])
    content = SIZE if spec is MLAAttentionSpec else 2 * SIZE
    memory = torch.zeros(len(NAMES), BLOCKS, heads, TOKENS, content, dtype=made.dtype)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="fp8" if quantised else "auto"),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: heads),
    )
    out = Layout.of(dict(zip(NAMES, memory, strict=True)), kv, config, Rank()).cache
    out.check()
    return out


def both(k: Any, v: Any) -> dict[str, Any]:
    return {name: loaded(k, v) for name in NAMES}


KINDS = pytest.mark.parametrize("spec", [FullAttentionSpec, MLAAttentionSpec])


@KINDS
def test_engines_of_the_same_scales(spec: type) -> None:
    route([cache(both(0.25, 0.5), spec)], [cache(both(0.25, 0.5), spec)])


@KINDS
@pytest.mark.parametrize(("k", "v"), [(0.125, 0.5), (0.25, 0.75)])
def test_engines_of_other_scales_are_refused_with_both(spec: type, k: float, v: float) -> None:
    with pytest.raises(Incompatible, match=f"k=0.25,v=0.5.*k={k},v={v}"):
        route([cache(both(0.25, 0.5), spec)], [cache(both(k, v), spec)])


def test_one_layer_of_another_scale() -> None:
    with pytest.raises(Incompatible, match="k=0.25,v=0.5.*k=0.25,v=1.0"):
        route([cache(both(0.25, 0.5))], [cache({**both(0.25, 0.5), "layer.1": loaded(0.25, 1.0)})])


def test_layers_of_scales_of_their_own() -> None:
    each = {name: loaded(0.25 + i, 0.5) for i, name in enumerate(NAMES)}
    (found,) = route([cache(each)], [cache(each)]).values()
    assert {
        layer for assignments in found.assignments.values() for assignment in assignments for layer in assignment.layers
    } == set(NAMES)


def test_a_scale_for_each_head() -> None:
    one, other = both([0.25, 0.5], [1.0, 2.0]), both([0.5, 0.25], [1.0, 2.0])
    route([cache(one)], [cache(one)])
    with pytest.raises(Incompatible, match="2 by head"):
        route([cache(one)], [cache(other)])


def test_a_checkpoint_without_scales_has_those_that_vllm_takes() -> None:
    route([cache(both(-1.0, -1.0))], [cache(both(1.0, 1.0))])


def test_scales_of_a_cache_that_is_not_quantised_are_of_no_matter() -> None:
    route([cache(both(0.25, 0.5), mode=KVQuantMode.NONE)], [cache(both(0.5, 0.5), mode=KVQuantMode.NONE)])


def test_a_quantised_cache_whose_layer_is_missing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer\.1"):
        cache({"layer.0": loaded(1.0, 1.0)})
