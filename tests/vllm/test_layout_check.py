"""The description of a cache against what vLLM's own kernels write, layer by layer, as at the start of a worker."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from vllm import _custom_ops as ops
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Group, Rank, Region, View
from kvxfer_vllm import worker
from kvxfer_vllm.layout import Layout
from kvxfer_vllm.layout_check import check_layout
from tests.counting import calls
from tests.vllm.engine import vllm_config
from tests.vllm.writers import AVX512

BLOCKS, TOKENS, HEAD = 40, 32, 32


@pytest.fixture
def config(tmp_path: pathlib.Path) -> VllmConfig:
    return vllm_config(tmp_path, KVTransferConfig(kv_connector="KVXferConnector", kv_role="kv_both"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of torch's that wait for each other burn processor time on a busy host."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def attention(
    config: VllmConfig,
    name: str,
    *,
    heads: int = 2,
    size: int = HEAD,
    dtype: str = "auto",
    of: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    """A layer of vLLM's with its cache; the cache. ``of``: another layer's."""
    config.cache_config.cache_dtype = dtype
    with set_current_vllm_config(config):
        layer = Attention(
            2 * heads, size, 1.0, num_kv_heads=heads, cache_config=config.cache_config, prefix=name, **more
        )
    layer.isa = _get_attn_isa(config.model_config.dtype, TOKENS, size, dtype)
    stored = torch.uint8 if dtype.startswith("fp8") else config.model_config.dtype
    shape = BLOCKS, heads, TOKENS, 2 * size
    memory = torch.randint(256, (*shape[:3], 2 * size * stored.itemsize), dtype=torch.uint8).view(stored)
    layer.bind_kv_cache(memory if of is None else of)
    return memory if of is None else of


def described(config: VllmConfig, tensors: dict[str, torch.Tensor], *, window: int = 0) -> Cache:
    """As the connector describes them, in one group beside one whose layers another stage has."""
    (heads, tokens, content), dtype = next(iter(tensors.values())).shape[1:], next(iter(tensors.values())).dtype
    shape: dict[str, Any] = {"block_size": tokens, "num_kv_heads": heads, "head_size": content // 2, "dtype": dtype}
    spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    groups = [KVCacheGroupSpec(["elsewhere"], spec), KVCacheGroupSpec(list(tensors), spec)]
    return Layout.of(tensors, KVCacheConfig(BLOCKS, [], groups), config, Rank()).cache


def refusal(cache: Cache, tensors: dict[str, torch.Tensor], config: VllmConfig) -> str:
    before = {name: t.view(torch.uint8).clone() for name, t in tensors.items()}
    with pytest.raises(ConfigError) as caught:
        check_layout(cache, tensors, config)
    assert all(torch.equal(t.view(torch.uint8), before[name]) for name, t in tensors.items())
    return str(caught.value)


def passes(cache: Cache, tensors: dict[str, torch.Tensor], config: VllmConfig, caplog: pytest.LogCaptureFixture) -> str:
    """What the connector logs. Blocks must be as before."""
    before = {t.data_ptr(): t.view(torch.uint8).clone() for t in tensors.values()}
    with caplog.at_level(logging.INFO, "kvxfer.vllm"):
        check_layout(cache, tensors, config)
    assert all(torch.equal(t.view(torch.uint8), before[t.data_ptr()]) for t in tensors.values())
    # Agents of earlier tests live on in this process, and log that nobody fetched what they had offered.
    return [r.getMessage() for r in caplog.records if r.name == "kvxfer.vllm"][-1]


@pytest.mark.parametrize(
    ("heads", "size", "dtype", "window"),
    [
        pytest.param(2, 32, "auto", 0, id="grouped"),
        pytest.param(1, 64, "auto", 0, id="one head"),
        pytest.param(4, 80, "auto", 24, id="window"),
        pytest.param(8, 128, "auto", 0, id="large"),
        pytest.param(2, 64, "fp8", 0, id="fp8", marks=AVX512),
    ],
)
@pytest.mark.parametrize("model", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_cpu_attention_is_as_described(
    config: VllmConfig,
    heads: int,
    size: int,
    dtype: str,
    window: int,
    model: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config.model_config.dtype = model
    torch.manual_seed(1)
    tensors = {
        f"model.layers.{i}.attn": attention(
            config,
            f"model.layers.{i}.attn",
            heads=heads,
            size=size,
            dtype=dtype,
            per_layer_sliding_window=window or None,
        )
        for i in range(3)
    }
    line = passes(described(config, tensors, window=window), tensors, config, caplog)
    assert line.startswith("3 of 3 layers write their KV cache as described, found in ")
    assert "not checked" not in line


def test_heads_in_another_order_stop_the_start(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.layers.0.attn"
    tensors = {name: attention(config, name, heads=4)}
    kernel = ops.cpu_attn_reshape_and_cache

    def other(k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> None:
        kernel(k.flip(1).contiguous(), v.flip(1).contiguous(), *rest, **more)

    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", other)
    said = refusal(described(config, tensors), tensors, config)
    assert said.startswith(f"layer {name!r} (Attention) does not write its KV cache as kvxfer would move it: ")
    assert "expected what the engine wrote of head 0 of plane 'kv' there; found" in said
    assert '"layout_check": false' in said


def test_a_cut_that_cpu_pages_do_not_have(config: VllmConfig) -> None:
    """As if they were rows of tokens: K, then V."""
    name = "model.layers.0.attn"
    tensors = {name: attention(config, name)}
    cache = described(config, tensors)
    (packed,) = cache.views
    row = 2 * HEAD
    k = replace(packed, plane="k", unit=row, token_stride=2 * row)
    v = replace(k, plane="v", offsets=tuple(o + row for o in k.offsets))
    said = refusal(replace(cache, views=(k, v)), tensors, config)
    assert "of head 0 of plane 'k' there; found" in said


@pytest.mark.parametrize("what", ["block stride", "head stride", "unit", "offset"])
def test_a_wrong_number_stops_the_start(config: VllmConfig, what: str) -> None:
    names = ["model.layers.0.attn", "model.layers.1.attn"]
    memory = torch.zeros(2, BLOCKS, 2, TOKENS, 2 * HEAD, dtype=torch.bfloat16)
    tensors = {name: attention(config, name, of=memory[i]) for i, name in enumerate(names)}
    cache = described(config, tensors)
    (view,) = cache.views
    assert view.heads is not None and view.heads.stride is not None
    page = view.heads.stride
    wrong = {
        "block stride": replace(view, block_stride=page),
        "head stride": replace(view, heads=replace(view.heads, stride=page // 2), unit=page // 2),
        "unit": replace(view, unit=page // 2),
        "offset": replace(view, offsets=(view.offsets[0], view.offsets[1] + page)),
    }[what]
    said = refusal(replace(cache, views=(wrong,)), tensors, config)
    assert ("layers.1" if what == "offset" else "layers.0") in said


def test_head_and_token_strides_exchanged_stop_the_start(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend with rows of tokens, which the CPU build has none of: played on a layer of vLLM's."""
    name = "model.layers.0.attn"
    more = torch.zeros(2 * BLOCKS, 2, TOKENS, 2 * HEAD, dtype=torch.bfloat16)  # the exchanged strides reach further
    tensors = {name: attention(config, name, of=more[:BLOCKS])}

    def rows(layer: Any, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[slots // TOKENS, :, slots % TOKENS] = torch.cat([k, v], -1)

    monkeypatch.setattr(config.compilation_config.static_forward_context[name].impl, "do_kv_cache_update", rows)
    cache = described(config, tensors)
    (packed,) = cache.views
    assert packed.heads is not None and packed.heads.stride is not None
    row = 2 * HEAD
    k = replace(packed, plane="k", unit=row, token_stride=2 * row)
    v = replace(k, plane="v", offsets=tuple(o + row for o in k.offsets))
    check_layout(replace(cache, views=(k, v)), tensors, config)
    swapped = [
        replace(p, heads=replace(packed.heads, stride=2 * row), token_stride=packed.heads.stride) for p in (k, v)
    ]
    said = refusal(replace(cache, views=tuple(swapped)), tensors, config)
    assert "token 1 of head 0 of plane 'k' there; found what the engine wrote of token 0 of head 1 of k" in said


def test_a_layer_that_shares_anothers_cache(config: VllmConfig, caplog: pytest.LogCaptureFixture) -> None:
    target, sharing = "model.layers.0.attn", "model.layers.1.attn"
    tensors = {target: attention(config, target)}
    cache = described(config, tensors)
    tensors[sharing] = attention(config, sharing, of=tensors[target], kv_sharing_target_layer_name=target)
    (view,) = cache.views
    both = replace(cache, views=(replace(view, layers=(target, sharing), offsets=view.offsets * 2),))
    assert passes(both, tensors, config, caplog).startswith("2 of 2 layers write")


def plain(tensors: dict[str, torch.Tensor], plane: str) -> Cache:
    """``[block, token, content]``, to be cut by token."""
    (name, t), *_ = tensors.items()
    block, _, token, _ = (s * t.element_size() for s in t.stride())
    view = View(plane, 0, (name,), (0,), len(t), block, t.shape[3] * t.element_size(), "test", None, token)
    return Cache((Region(t.data_ptr(), t.untyped_storage().nbytes()),), (Group(TOKENS),), (view,))


def test_latents_are_as_described(config: VllmConfig, caplog: pytest.LogCaptureFixture) -> None:
    name, memory = "model.layers.0.attn", torch.zeros(BLOCKS, 1, TOKENS, 512 + 64, dtype=torch.bfloat16)
    config.compilation_config.static_forward_context[name] = SimpleNamespace(
        impl=CPUMLAImpl.__new__(CPUMLAImpl),
        get_attn_backend=lambda: CPUMLABackend,
        kv_cache=memory.squeeze(1),
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dtype="auto",
        _k_scale=torch.ones(()),
    )
    tensors = {name: memory}
    cache = plain(tensors, "latent")
    assert passes(cache, tensors, config, caplog).startswith("1 of 1 layers write")
    (view,) = cache.views
    short = replace(view, unit=1024)
    said = refusal(replace(cache, views=(short,)), tensors, config)
    assert "expected all that is written of a block in 'latent'; found" in said


def test_an_indexers_page_is_no_rows_of_tokens(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The values of a page's tokens, then their scales, as ``indexer_k_quant_and_cache`` has them on a GPU. The page of a
    DeepSeek V3.2 was once described as 132 bytes a token."""

    def kernel(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, group: int, scale_format: str) -> None:
        assert (k.shape[1], group, scale_format) == (128, 128, "ue8m0")
        scale = torch.exp2(torch.log2(k.float().abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448).ceil())
        page = cache.flatten(1)
        values, scales = page[:, : TOKENS * 128], page[:, TOKENS * 128 :]
        block, token = slots // TOKENS, slots % TOKENS
        values.unflatten(1, (TOKENS, 128))[block, token] = (k.float() / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        scales.unflatten(1, (TOKENS, 4))[block, token] = scale.view(torch.uint8)

    monkeypatch.setattr(ops, "indexer_k_quant_and_cache", kernel)
    name, memory = "model.layers.0.indexer.k_cache", torch.zeros(BLOCKS, 1, TOKENS, 132, dtype=torch.uint8)
    layer = type("DeepseekV32IndexerCache", (), {"head_dim": 132, "uses_shuffled_layout": False})()
    layer.kv_cache = memory.squeeze(1)
    config.compilation_config.static_forward_context[name] = layer
    tensors = {name: memory}
    cache = plain(tensors, "latent")
    said = refusal(cache, tensors, config)
    assert (
        "expected what the engine wrote of token 0 of plane 'latent' there; found what the engine wrote of token 1"
        in said
    )
    (view,) = cache.views
    whole = replace(view, unit=132 * TOKENS, token_stride=None)
    assert passes(replace(cache, views=(whole,)), tensors, config, caplog).startswith("1 of 1 layers write")
    at = view.offsets[0] + TOKENS * 128
    rows = (
        replace(view, plane="index values", unit=128, token_stride=128),
        replace(view, plane="index scales", unit=4, token_stride=4, offsets=(at,)),
    )
    assert passes(replace(cache, views=rows), tensors, config, caplog).startswith("1 of 1 layers write")
    said = refusal(replace(cache, views=(rows[0], replace(rows[1], offsets=(at - 4,)))), tensors, config)
    assert "plane 'index scales'" in said


def test_what_has_no_write_of_its_own_is_named_and_let_be(
    config: VllmConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "model.layers.0.attn"
    tensors = {name: attention(config, name)}
    cache = described(config, tensors)
    model = config.compilation_config.static_forward_context
    state = replace(cache.views[0], layers=("s",), plane="state")
    tensors["s"], model["s"] = torch.zeros(BLOCKS, 1, 1, 64), type("MambaMixer2", (), {})()
    line = passes(replace(cache, views=(*cache.views, state)), tensors, config, caplog)
    assert line.startswith("1 of 2 layers write")
    assert line.endswith("; not checked: 1 x MambaMixer2 (it has no write that can be called by itself)")

    def newer(layer: Any, kv: Sequence[torch.Tensor]) -> None: ...

    monkeypatch.setattr(model[name].impl, "do_kv_cache_update", newer)
    line = passes(cache, tensors, config, caplog)
    assert line.startswith("0 of 1 layers write")
    assert "not checked: 1 x Attention (" in line and "positional arguments" in line


@pytest.mark.parametrize("asked", [True, False])
def test_a_worker_asks_for_it_unless_told_not_to(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    name, started = "model.layers.0.attn", []
    tensors = {name: attention(config, name)}
    heads = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=HEAD, dtype=torch.bfloat16)
    kv = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec([name], heads)])
    writes = config.compilation_config.static_forward_context[name].impl
    monkeypatch.setattr(writes, "do_kv_cache_update", lambda *a: None)  # so it writes nothing at all
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(
        worker, "Agent", lambda *a: started.append(a) or SimpleNamespace(descriptor=None, cache=a[0], listen=id)
    )
    half = worker.WorkerHooks(Config(layout_check=asked), config, kv)
    if asked:
        with pytest.raises(ConfigError, match="expected what the engine wrote of head 0 of plane 'kv' there"):
            half.register(tensors)
    else:
        half.register(tensors)
    assert bool(started) == (not asked)


def test_eighty_layers_do_not_hold_up_a_start(config: VllmConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Layers of 8 heads of 128, all in one's memory: no layer costs more because others are there."""
    first = attention(config, "model.layers.0.attn", heads=8, size=128)
    tensors = {"model.layers.0.attn": first}
    for i in range(1, 80):
        tensors[f"model.layers.{i}.attn"] = attention(config, f"model.layers.{i}.attn", heads=8, size=128, of=first)
    cache = described(config, {"model.layers.0.attn": first})
    cache = replace(cache, views=tuple(replace(v, layers=tuple(tensors), offsets=v.offsets * 80) for v in cache.views))
    one = described(config, {"model.layers.0.attn": first})
    alone = calls(lambda: check_layout(one, {"model.layers.0.attn": first}, config))
    assert calls(lambda: check_layout(cache, tensors, config)) < 1.2 * 80 * alone
    assert passes(cache, tensors, config, caplog).startswith("80 of 80 layers write")
