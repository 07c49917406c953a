"""Rings of rows that are not yet compressed, by vLLM's own slot for a row (``_ring_slot_mapping_kernel``: position modulo rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec

from kvxfer.errors import ConfigError
from kvxfer.geometry import Incompatible
from kvxfer_vllm import internals
from kvxfer_vllm.pages.forms import writer_of
from kvxfer_vllm.pages.groups import group_pages
from tests.vllm.engine import Group
from tests.vllm.sides import Layer, backend, engine, fill, law, load
from tests.vllm.test_catalogue import groups
from tests.vllm.writers import attention, gpu


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 9)


REPLAYED = Group(window=24, replayed=True)


def ring(rows: int, heads: int = 1, by: str = "models.deepseek_v41.compressor.CompressorBackend") -> dict[str, Layer]:
    def spec(size: int, block: int) -> Any:
        return CircularBufferSpec(block_size=rows, num_kv_heads=heads, head_size=16, head_size_v=0, dtype=torch.float32)

    def write(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: Any) -> None:
        for position in positions:
            t[int(blocks[0]), :, int(position) % rows] = float(position + 1)

    return {f"model.layers.{i}.ring": Layer(spec, write, backend(by)) for i in range(2)}


def rows_of_a_page() -> dict[str, Layer]:
    """Step 5: as many rows of 1 KB as there is room for, here 48 beside blocks of 64 tokens."""

    def spec(size: int, block: int) -> Any:
        return CircularBufferSpec(block_size=block, num_kv_heads=1, head_size=384, head_size_v=0, dtype=torch.bfloat16)

    def write(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: Any) -> None:
        rows = t[int(blocks[0])].view(-1, 512)
        for position in positions:
            rows[int(position) % len(rows)] = float(position + 1)

    home = "models.step5.nvidia.csa_tail_ring.Step5CSATailRingBackend"
    return {f"model.layers.{i}.attn.csa_tail_ring": Layer(spec, write, backend(home)) for i in range(2)}


QWEN_4 = "models.qwen4_exp.common.qsa_cache.QSAStateBackend"
RINGS = {
    "a slot for each row": (ring(8), 8, range(2, 20)),
    "Qwen 4": (ring(4, by=QWEN_4), 4, range(2, 11)),
    "keys and scores, in two slots": (
        ring(8, 2, "v1.attention.backends.mla.indexer.KpoolTailBackend"),
        8,
        range(2, 19),
    ),
    "a page of the attention beside it": (rows_of_a_page(), 64, (2, 47, 48, 49, 95, 96, 97, 130)),
}


@pytest.mark.parametrize(("layers", "block", "lengths"), RINGS.values(), ids=RINGS)
def test_a_ring_is_as_of_the_last_token(layers: dict[str, Layer], block: int, lengths: Sequence[int]) -> None:
    """For whoever writes the next row into it, wherever in the ring that is; the same on all ranks."""
    for n in lengths:
        for at_p, at_d in ((1, 1), (4, 2), (2, 4)):
            p = engine(layers, block, at_p, "BLHNC")
            d, whole = (engine(layers, block, at_d, "BLHNC") for _ in range(2))
            fill(p, layers, [3], range(n - 1))
            fill(whole, layers, [5], range(n))
            load(p, d, [3], [5], 0, n - 1)
            fill(d, layers, [5], [n - 1])
            assert all(torch.equal(got.memory, expected.memory) for got, expected in zip(d, whole, strict=True))


def groups_of_four(t: torch.Tensor, spec: Any, blocks: Any, rank: int, size: int, positions: Any) -> None:
    """A row for each complete group (``QSACompressedKeyCache``)."""
    rows = t.shape[2]
    for position in positions[positions % 4 == 3]:
        t[int(blocks[position // (rows * 4)]), :, int(position) // 4 % rows] = float(position + 1)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 4), (4, 2), (1, 4), (8, 4), (4, 1)])
@pytest.mark.parametrize("n", [65, 126, 127, 190])
def test_qwen_4_between_any_numbers_of_ranks(sizes: tuple[int, int], n: int) -> None:
    """Heads are cut, by vLLM's own writer; what all ranks hold alike comes from one of them: the rows made of the ring."""

    def compressed(size: int, block: int) -> Any:
        return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=16, dtype=torch.float32, tokens_per_state=4)

    main = attention(4)
    cached = {
        "model.layers.3.self_attn.attn": replace(
            main, backend=backend("models.qwen4_exp.nvidia.qsa.Qwen4ExpQSAFlashAttentionBackend")
        )
    }
    rows = {"model.layers.3.compressed_key_cache": Layer(compressed, groups_of_four, backend(QWEN_4))}
    p_size, d_size = sizes
    for layers in (cached, rows):
        p = engine(layers, 64, p_size, "BLHNC", hf={"num_key_value_heads": 4})
        d, whole = (engine(layers, 64, d_size, "BLHNC", hf={"num_key_value_heads": 4}) for _ in range(2))
        law(layers, p, d, whole, (64, 64), n)


@pytest.mark.parametrize("name", ["Step5DSAAttentionBackend", "Step5SplitKVFlashAttentionBackend"])
def test_a_back_end_that_keeps_the_name_of_its_base_is_known_by_its_own(name: str) -> None:
    """Step 5's differ from FlashAttention's in more than how they are told what to do; a stranger that does is not known."""
    for module, found in (
        ("vllm.models.step5.nvidia.sparse_attention", f"models.step5.nvidia.sparse_attention.{name}"),
        ("x", ""),
    ):
        kind = type(name, (FlashAttentionBackend,), {"__module__": module, "get_impl_cls": staticmethod(lambda: None)})
        assert writer_of(internals.Layer(SimpleNamespace(get_attn_backend=lambda kind=kind: kind))) == found


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ((8, "models.x.A", 1), (16, "models.x.A", 1), "encoding"),
        ((8, "models.x.A", 1), (8, "models.x.B", 1), "encoding"),
        ((8, "models.x.A", 1), (8, "models.x.A", 2), "head total"),
    ],
    ids=["more drafts", "another writer", "ranks that may hold parts"],
)
def test_rings_that_differ_are_refused_by_name(one: Any, other: Any, why: str) -> None:
    p, d = (engine(ring(rows, by=by), rows, ranks) for rows, by, ranks in (one, other))
    with pytest.raises(Incompatible, match=why):
        load(p, d, [1], [1], 0, 5)


def test_a_window_that_no_load_brings_is_refused_where_it_is_replayed() -> None:
    with pytest.raises(ConfigError, match="set --no-swa-bounded-replay"):
        group_pages(groups(REPLAYED.spec(), enable_kv_transfer=False))
    (found,) = group_pages(groups(REPLAYED.spec()))
    assert (found.group.kind, found.group.window) == ("window", 24)
