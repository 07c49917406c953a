"""What lies in each kind of page, against whoever writes it: vLLM's own kernels where the CPU build has them, else an
independent description of the page, made from the source that is named with it.

One law for all: whoever loads all but the last token and computes that one holds, byte for byte, what it would hold had it
computed all.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa
from vllm.v1.attention.backends.mla.amx_mla import AMXMLABackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.flashmla_sparse import FlashMLASparseBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvxfer.errors import ConfigError
from kvxfer.geometry import Incompatible
from tests.vllm.sides import BLOCKS, Layer, backend, engine, fill, law, load, table
from tests.vllm.writers import AVX512, DIM, ORDERS, attention, gemma4, gpu, heads_of, hybrid, make, mimo, nas, numbers


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 9)


NAMES_SHARDS = "max_tp_shards" in {f.name for f in fields(FullAttentionSpec)}
"""Whether a spec says how many ranks hold pages of their own."""
KINDS = {
    "full": (FullAttentionSpec, {}),
    "sink": (SinkFullAttentionSpec, {"sink_len": 16}),
    "rswa": (RSWASpec, {"rswa_window": 64}),
    "window": (SlidingWindowSpec, {"sliding_window": 100_000}),
    "chunk": (ChunkedLocalAttentionSpec, {"attention_chunk_size": 100_000}),
    "another size of V": (FullAttentionSpec, {"head_size_v": 8}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("p_order", "d_order"), [("LBHNC", "LBNHC"), ("LHBNC", "BLHNC"), ("BHLNC", "LBHNC")])
def test_k_and_v_go_from_any_layout_to_any(kind: str, p_order: str, d_order: str) -> None:
    cls, more = KINDS[kind]
    layers = {f"model.layers.{i}.attn": attention(4, cls, **more) for i in range(2)}
    p = engine(layers, 32, 2, p_order, hf={"num_key_value_heads": 4})
    d, whole = (engine(layers, 48, 4, d_order, hf={"num_key_value_heads": 4}) for _ in range(2))
    law(layers, p, d, whole, (32, 48), 150)


def test_kernel_blocks_are_cut_from_logical_ones() -> None:
    layers = {"model.layers.0.attn": attention(2)}
    p = engine(layers, 64, kernel=16)
    d, whole = (engine(layers, 32, order="LBNHC") for _ in range(2))
    law(layers, p, d, whole, (64, 32), 150, start=32)


# --- CPU: the kernel packs a head's tokens for the instruction set


def write_cpu(total: int, cache_dtype: str) -> Any:
    def write(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
        blocks_, heads_, tokens, _ = t.shape
        key_cache, value_cache = t.view((blocks_, heads_, tokens * 2, -1)).chunk(2, dim=2)
        mine = list(heads_of(spec, total, rank, size))
        slots = torch.from_numpy(blocks[positions // tokens] * tokens + positions % tokens)
        isa = _get_attn_isa(torch.bfloat16, tokens, spec.head_size, cache_dtype)
        ops.cpu_attn_reshape_and_cache(
            numbers("k", total, positions, spec.head_size)[:, mine].to(torch.bfloat16),
            numbers("v", total, positions, spec.head_size)[:, mine].to(torch.bfloat16),
            key_cache,
            value_cache,
            slots,
            isa,
            1.0,
            1.0,
            cache_dtype,
        )

    return write


@pytest.mark.parametrize("n", [33, 150, 161])
@pytest.mark.parametrize(
    "cache_dtype", ["auto", pytest.param("fp8_e4m3", marks=AVX512), pytest.param("fp8_e5m2", marks=AVX512)]
)
def test_pages_of_the_cpu_kernel(cache_dtype: str, n: int) -> None:
    stored = torch.bfloat16 if cache_dtype == "auto" else torch.uint8
    mode = KVQuantMode.NONE if cache_dtype == "auto" else KVQuantMode.FP8_PER_TENSOR
    layer = attention(4, by=CPUAttentionBackend, head_size=32, head_size_v=32, dtype=stored, kv_quant_mode=mode)
    layers = {"model.layers.0.attn": Layer(layer.spec, write_cpu(4, cache_dtype), layer.backend, layer.more)}
    p = engine(layers, 32, 2, hf={"num_key_value_heads": 4})
    d, whole = (engine(layers, 32, 1, hf={"num_key_value_heads": 4}) for _ in range(2))
    law(layers, p, d, whole, (32, 32), n)


# --- latents: a row a token, by vLLM's own writers for CPUs


def write_latent(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
    slots = torch.from_numpy(blocks[positions // t.shape[2]] * t.shape[2] + positions % t.shape[2])
    rows = numbers("latent", 1, positions, spec.head_size).to(t.dtype)
    CPUMLAImpl.do_kv_cache_update(
        SimpleNamespace(), rows[:, 0, :-8].contiguous(), rows[..., -8:].contiguous(), t.squeeze(1), slots, "auto", None
    )


def write_latent_kernel(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
    slots = torch.from_numpy(blocks[positions // t.shape[2]] * t.shape[2] + positions % t.shape[2])
    rows = numbers("latent", 1, positions, spec.head_size).to(t.dtype)
    ops.amx_mla_concat_and_cache(rows[:, 0, :-8].contiguous(), rows[:, 0, -8:].contiguous(), t.squeeze(1), slots)


def latent(write: Any = write_latent, by: Any = CPUMLABackend, cls: Any = MLAAttentionSpec, **more: Any) -> Layer:
    given = {"num_kv_heads": 1, "head_size": 40, "dtype": torch.bfloat16, "max_tp_shards": 1, **more}
    return Layer(lambda size, block: make(cls, block_size=block, **given), write, by, {"kv_cache_dtype": "auto"})


@pytest.mark.parametrize("n", [1 + 1, 150, 190])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(latent(), id="cpu"),
        pytest.param(latent(write_latent_kernel, AMXMLABackend), id="amx", marks=AVX512),
        pytest.param(latent(by=FlashMLASparseBackend), id="flashmla"),
    ],
)
def test_latents_are_rows(layer: Layer, n: int) -> None:
    layers = {"model.layers.0.attn": layer}
    p = engine(layers, 64, 4, kernel=16)
    d, whole = (engine(layers, 48, 2) for _ in range(2))
    law(layers, p, d, whole, (64, 48), n)


def write_rows(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
    """656 bytes a token: 512 of values, 4 scales of 4 bytes, 128 of the rotary part (vllm/v1/attention/backends/mla/
    flashmla_sparse.py)."""
    t[torch.from_numpy(blocks[positions // t.shape[2]]), 0, torch.from_numpy(positions % t.shape[2])] = (
        numbers("fp8_ds_mla", 1, positions, 656)[:, 0] * 100
    ).to(torch.uint8)


def ds_mla(**more: Any) -> Layer:
    given = {
        "dtype": torch.uint8,
        "state_content_bytes": 656,
        "cache_dtype_str": "fp8_ds_mla",
        "head_size": 576,
        **more,
    }
    layer = latent(write_rows, FlashMLASparseBackend, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, **given)
    return Layer(layer.spec, layer.write, layer.backend, {"kv_cache_dtype": "fp8_ds_mla"})


# --- the sparse indexer: all values of a page, then all scales (vllm/models/deepseek_v32/common/kernels.py,
#     _fp8_quant_and_cache_write: values at slot * HEAD_DIM, scales at block_size * HEAD_DIM + slot * 4)


def write_indexer(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
    tokens, values = t.shape[2], 128
    pages = t.reshape(t.shape[0], tokens * 132)
    assert pages.data_ptr() == t.data_ptr()
    k = (numbers("index", 1, positions, values)[:, 0] * 50).to(torch.int8).view(torch.uint8)
    scales = numbers("scale", 1, positions, 1)[:, 0].contiguous().view(torch.uint8)
    for i, position in enumerate(positions):
        page, slot = pages[int(blocks[position // tokens])], int(position % tokens)
        page[slot * values : (slot + 1) * values] = k[i]
        page[tokens * values + slot * 4 : tokens * values + slot * 4 + 4] = scales[i]


def indexer(**more: Any) -> Layer:
    given = {"head_size": 132, "dtype": torch.uint8, **more}
    layer = latent(write_indexer, DeepseekV32IndexerBackend, **given)
    return Layer(layer.spec, layer.write, layer.backend, {"uses_shuffled_layout": False})


SPARSE = {"model.layers.0.attn": ds_mla(), "model.layers.0.indexer.k_cache": indexer()}
SHUFFLED = {**SPARSE, "model.layers.0.indexer.k_cache": replace(indexer(), more={"uses_shuffled_layout": True})}


@pytest.mark.keep(12)
@pytest.mark.parametrize("start", [0, 64])
@pytest.mark.parametrize("n", [65, 150, 190, 192])
@pytest.mark.parametrize("sizes", [(1, 1), (8, 4), (2, 8)])
@pytest.mark.parametrize("layers", [SPARSE, SHUFFLED], ids=["rows", "shuffled"])
def test_scales_of_a_sparse_indexer_go_with_their_tokens(
    layers: dict[str, Layer], sizes: tuple[int, int], n: int, start: int
) -> None:
    p = engine(layers, 64, sizes[0])
    d, whole = (engine(layers, 64, sizes[1]) for _ in range(2))
    law(layers, p, d, whole, (64, 64), n, start)


@pytest.mark.parametrize("n", [2, 65, 150, 191])
@pytest.mark.parametrize("sizes", [(64, 32), (32, 64), (64, 48)])
def test_an_indexers_pages_go_into_pages_of_other_sizes(sizes: tuple[int, int], n: int) -> None:
    p = engine(SPARSE, sizes[0], 2, kernel=16 if sizes[0] == 64 else None)
    d, whole = (engine(SPARSE, sizes[1]) for _ in range(2))
    law(SPARSE, p, d, whole, sizes, n)


@pytest.mark.parametrize(
    "layers",
    [
        SHUFFLED,
        {"model.layers.0.indexer.k_cache": indexer(head_size=68)},
        {"model.layers.0.indexer.k_cache": indexer(dtype=torch.int16)},
    ],
    ids=["shuffled", "fp4", "of two bytes"],
)
def test_pages_of_another_indexer_of_other_sizes_are_refused_by_name(layers: dict[str, Layer]) -> None:
    with pytest.raises(Incompatible, match=r"MLAAttentionSpec.*DeepseekV32IndexerBackend|token \(opaque\)"):
        load(engine(layers, 64), engine(layers, 32), [1], [1, 2], 0, 64)


def test_an_indexer_that_stores_other_scales_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import deep_gemm

    p = engine(SPARSE, 64)
    monkeypatch.setattr(deep_gemm, "is_deep_gemm_e8m0_used", lambda: True)
    with pytest.raises(Incompatible, match="None-fp32.*None-ue8m0"):
        load(p, engine(SPARSE, 64), [1], [1], 0, 64)


def test_an_indexer_of_another_sort_of_device_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    p = engine(SPARSE, 64)
    gpu(monkeypatch, 10)
    with pytest.raises(Incompatible, match="sm90.*sm100"):
        load(p, engine(SPARSE, 64), [1], [1], 0, 64)


# --- several tokens a row, and what else is moved whole


def write_compressed(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
    """A row for every four tokens, written with the last of them; 576 bytes each, then 8 bytes of scales for each
    (vllm/models/deepseek_v4/attention.py; FlashMLA's page)."""
    rows = t.shape[2]
    pages = t.reshape(t.shape[0], rows * 584)
    for position in positions[positions % 4 == 3]:
        page, row = pages[int(blocks[position // (rows * 4)])], int(position // 4 % rows)
        content = (numbers("c4", 1, np.array([position]), 584)[0, 0] * 100).to(torch.uint8)
        page[row * 576 : (row + 1) * 576] = content[:576]
        page[rows * 576 + row * 8 : rows * 576 + (row + 1) * 8] = content[576:]


@pytest.mark.parametrize("n", [65, 150, 191])
def test_rows_of_several_tokens_go_with_their_page(n: int) -> None:
    layers = {
        "model.layers.0.attn": latent(
            write_compressed,
            backend("models.deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend"),
            tokens_per_state=4,
            state_content_bytes=584,
            dtype=torch.uint8,
            head_size=512,
            model_version="deepseek_v4",
        )
    }
    p = engine(layers, 64, 8)
    if not NAMES_SHARDS:  # nothing says that ranks hold the same
        with pytest.raises(Incompatible, match="head total"):
            load(p, engine(layers, 64, 2), [1, 2], [1, 2], 0, n - 1)
    d, whole = (engine(layers, 64, 2 if NAMES_SHARDS else 8) for _ in range(2))
    law(layers, p, d, whole, (64, 64), n)


def test_a_window_of_latents_is_a_window() -> None:
    layer = {"model.layers.0.attn": latent(cls=SlidingWindowMLASpec, sliding_window=40)}
    group = engine(layer, 64)[0].layout.cache.groups[0]
    assert (group.kind, group.window) == ("window", 40)


class Unheard(FullAttentionSpec):
    """A spec of a plug-in: vLLM takes it for what it is derived from."""


def write_scattered(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: np.ndarray) -> None:
    """All tokens of a page are mixed: each is every 16th byte of it."""
    pages = t.view(torch.uint8).reshape(t.shape[0], -1)
    for position in positions:
        slot = int(position % t.shape[2])
        page = pages[int(blocks[position // t.shape[2]])]
        page[slot :: t.shape[2]] = (position * 7 + rank) % 250 + 1


@pytest.mark.parametrize(
    "layer",
    [
        attention(4, Unheard),
        attention(4, by=backend("v1.attention.backends.somebodys.Backend")),
        attention(4, by=None),
        attention(4, kv_quant_mode=KVQuantMode.TURBOQUANT_K8V4),
        attention(4, num_head_slots=2, state_content_bytes=4 * DIM * 2),
    ],
    ids=["spec", "back end", "no layer", "quantisation", "slots"],
)
@pytest.mark.parametrize("order", ORDERS)
def test_what_nobody_knows_is_moved_whole(layer: Layer, order: str) -> None:
    layers = {"model.layers.0.attn": Layer(layer.spec, write_scattered, layer.backend, layer.more)}
    if layer.spec(2, 32).num_heads > 1 and order == "BHLNC":
        order = "BLHNC"  # of one layer they are the same
    p = engine(layers, 32, 2, order)
    d, whole = (engine(layers, 32, 2, order) for _ in range(2))
    if order == "LHBNC":
        assert {v.plane for v in p[0].layout.cache.views} == {"page 0", "page 1"}
        return  # its pieces lie apart, which the writer above does not know of
    law(layers, p, d, whole, (32, 32), 150)
    for other in (engine(layers, 64, 2, order), engine(layers, 32, 1, order)):
        with pytest.raises(Incompatible):
            load(p, other, [1], [1], 0, 32)


def test_a_page_in_pieces_goes_in_pieces() -> None:
    layers = {"model.layers.0.attn": attention(4, by=backend("v1.attention.backends.somebodys.Backend"))}
    p = engine(layers, 32, 2, "LHBNC")
    d, whole = (engine(layers, 32, 2, "LHBNC") for _ in range(2))
    law(layers, p, d, whole, (32, 32), 150)


def test_pages_of_unknown_content_in_too_many_pieces_stop_the_start() -> None:
    layers = {f"model.layers.{i}.attn": attention(4, Unheard) for i in range(2)}
    engine(layers, 32, 1, "LBNHC")
    spread = attention(4, Unheard)
    with pytest.raises(ConfigError, match=r"layer 'model.layers.0.attn': nothing is known"):
        engine({"model.layers.0.attn": spread}, 32, 1, "NLBHC")


# --- heads by layer


MODELS = {"gemma4": (gemma4, 4, 16), "mimo": (mimo, 4, 8), "nemotron nas": (nas, 2, 8), "uniform": (mimo, 8, 8)}


@pytest.mark.keep(12)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "sizes", [(8, 4), (8, 2), (8, 1), (4, 8), (2, 8), (1, 8), (8, 8), (4, 2), (2, 1), (1, 2), (16, 8), (8, 16)]
)
def test_heads_are_those_of_the_layer(model: str, sizes: tuple[int, int]) -> None:
    config, full, sliding = MODELS[model]
    hf, layers = config(full, sliding), hybrid(full, sliding)
    p = engine(layers, 32, sizes[0], hf=hf)
    d, whole = (engine(layers, 32, sizes[1], hf=hf) for _ in range(2))
    law(layers, p, d, whole, (32, 32), 70)


@pytest.mark.parametrize("sizes", [(8, 2), (2, 8), (4, 2), (8, 4)])
def test_heads_are_those_of_the_layer_where_all_layers_have_one_spec(sizes: tuple[int, int]) -> None:
    """Without its hybrid manager vLLM merges specs that differ in their windows only: a full layer's names a window, too."""
    merged = replace(attention(2, sliding_window=64), more=attention(2).more)
    layers = {"model.layers.0.self_attn.attn": attention(1, sliding_window=64), "model.layers.1.self_attn.attn": merged}
    p = engine(layers, 32, sizes[0], hf=mimo(2, 1))
    d, whole = (engine(layers, 32, sizes[1], hf=mimo(2, 1)) for _ in range(2))
    law(layers, p, d, whole, (32, 32), 70)


def test_heads_of_no_certain_number_stay_with_their_rank(caplog: pytest.LogCaptureFixture) -> None:
    hf = {"num_key_value_heads": 4, "other": {"num_key_value_heads": 8}}
    layers = {"model.layers.0.self_attn.attn": attention(4)}
    p = engine(layers, 32, 8, hf=hf)
    assert "not known how many KV heads" in caplog.text and "model.layers.0.self_attn.attn" in caplog.text
    d, whole = (engine(layers, 32, 8, hf=hf) for _ in range(2))
    law(layers, p, d, whole, (32, 32), 70)
    with pytest.raises(Incompatible, match="head"):
        load(p, engine(layers, 32, 2, hf=hf), [1], [1], 0, 32)


@pytest.mark.skipif(not NAMES_SHARDS, reason="specs of this vLLM do not name it")
def test_a_number_of_heads_that_the_spec_names_is_believed() -> None:
    hf = {"num_key_value_heads": 4, "other": {"num_key_value_heads": 8}}
    layers = {"model.layers.0.self_attn.attn": attention(4, max_tp_shards=4)}
    p = engine(layers, 32, 8, hf=hf)
    d, whole = (engine(layers, 32, 2, hf=hf) for _ in range(2))
    law(layers, p, d, whole, (32, 32), 70)


# --- layers that share a cache


def test_layers_that_share_a_cache_are_moved_once() -> None:
    layers = {"model.layers.0.attn": attention(2)}
    shared = {"model.layers.1.attn": "model.layers.0.attn"}
    p = engine(layers, 32, shared=shared)
    d, whole = (engine(layers, 32, shared=shared) for _ in range(2))
    law(layers, p, d, whole, (32, 32), 70)
    assert {n for v in p[0].layout.cache.views for n in v.layers} == {"model.layers.0.attn"}


# --- windows and chunks with blocks that are gone


@pytest.mark.parametrize(
    ("cls", "more", "first"),
    [(SlidingWindowSpec, {"sliding_window": 40}, 3), (ChunkedLocalAttentionSpec, {"attention_chunk_size": 64}, 4)],
)
def test_blocks_that_have_fallen_behind_are_not_wanted(cls: Any, more: dict[str, int], first: int) -> None:
    layers = {"model.layers.0.attn": attention(2, cls, **more)}
    (p,), (d,) = engine(layers, 32), engine(layers, 32)
    n, src, dst = 150, table(32, 150, 1), table(32, 150, 2)
    fill([p], layers, src, range(n))
    load([p], [d], [-1] * first + src[first:], [-1] * first + dst[first:], 0, n - 1)
    moved = p.tensors["model.layers.0.attn"], d.tensors["model.layers.0.attn"]
    for i in range(first, 4):
        assert torch.equal(moved[0][src[i]], moved[1][dst[i]])
    untouched = [b for b in range(BLOCKS) if b not in dst[first:]]
    assert not moved[1][untouched].any()
