"""Context parallelism in vLLM: which tokens a rank has, by vLLM's own slot mapping, and what of its groups and ranks follows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.worker import block_table

from kvxfer.errors import ConfigError
from kvxfer.geometry import Rank, TokenTurns
from kvxfer_vllm.layout import Place, rank_of
from kvxfer_vllm.pages.groups import group_pages
from tests.geometry.layouts import dealt
from tests.vllm.cases import check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import BLOCK, Group, prompt
from tests.vllm.sides import Side, engine, fill, law, load, table
from tests.vllm.test_catalogue import groups
from tests.vllm.test_pages import indexer, latent
from tests.vllm.writers import attention, gpu

overlap = both_ways


TOKENS = 150


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's kernel that gives tokens their slots, under Triton's interpreter. Without a GPU vLLM has left it a plain function."""
    found = block_table.ComputeSlotMappingKernel.kernel
    plain = getattr(found, "fn", found)
    for name, module in (("tl", triton.language), ("triton", triton)):
        monkeypatch.setitem(plain.__globals__, name, module)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return triton.jit(plain)


def test_slots_are_those_of_vllms_kernel(kernel: Any) -> None:
    # Of attention kernels and of the cache, as in 0.31; they are equal here.
    two_sizes = "BLOCKS_PER_KV_BLOCK" in kernel.arg_names
    for size, ranks, span in itertools.product((8, 16), (1, 2, 3, 4), (1, 2, 8)):
        blocks = [(5 * i + 3) % 23 for i in range(TOKENS // size + 1)]
        for rank in range(ranks):
            out, table = torch.full((TOKENS + 3,), 7), torch.tensor([blocks], dtype=torch.int32)
            kernel[(2,)](
                TOKENS,
                TOKENS + 3,
                torch.tensor([0, TOKENS], dtype=torch.int32),
                torch.arange(TOKENS),
                table,
                table.stride(0),
                *([size] if two_sizes else []),
                out,
                KV_CACHE_BLOCK_SIZE=size,
                TOTAL_CP_WORLD_SIZE=ranks,
                TOTAL_CP_RANK=rank,
                CP_KV_CACHE_INTERLEAVE_SIZE=span,
                PAD_ID=-1,
                BLOCK_SIZE=64,
                **({"BLOCKS_PER_KV_BLOCK": 1} if two_sizes else {}),
            )
            at = map(dealt(rank, ranks, span).get, range(TOKENS))
            assert out[:TOKENS].tolist() == [-1 if i is None else blocks[i // size] * size + i % size for i in at]


# --- loads between engines of tensors


LATENTS = {f"model.layers.{i}.attn": latent() for i in range(2)}
TURNS = [(1, 1), (2, 1), (2, 16), (4, 1), (4, 4), (3, 2)]


@pytest.mark.keep(12)
@pytest.mark.parametrize("n", [2, 190])
@pytest.mark.parametrize("d", TURNS)
@pytest.mark.parametrize("p", TURNS)
def test_latents_go_from_any_turns_to_any(p: tuple[int, int], d: tuple[int, int], n: int) -> None:
    """Prefill at 32 tokens a block of each rank, in blocks of 16 for the kernels, and at 48 on the other side."""
    one = engine(LATENTS, 32, max(p[0], 2), turns=p, kernel=16) if p[0] != 3 else engine(LATENTS, 32, 3, turns=p)
    two, whole = (engine(LATENTS, 48, d[0] * 2, "LBNHC", turns=d) for _ in range(2))
    start = 0 if n < 100 else 48 * d[0]
    law(LATENTS, one, two, whole, (32 * p[0], 48 * d[0]), n, start if start < n else 0)


INDEXERS = {f"model.layers.{i}.indexer.k_cache": replace(indexer(), write=latent().write) for i in range(2)}
"""Written in rows of 132 bytes first, from which ``segregate`` makes pages: the values of all rows, then their scales."""


def segregate(sides: list[Side], back: bool = False) -> None:
    for t in (t for side in sides for t in side.tensors.values()):
        tokens = t.shape[2]
        pages = t.reshape(len(t), tokens * 132)
        assert pages.data_ptr() == t.data_ptr()
        parts = pages.split([128 * tokens, 4 * tokens], 1) if back else (t[:, 0, :, :128], t[:, 0, :, 128:])
        pages.copy_(
            torch.cat([part.reshape(len(t), tokens, -1) for part in parts], 2).flatten(1)
            if back
            else torch.cat([part.flatten(1) for part in parts], 1)
        )


@pytest.mark.keep(12)
@pytest.mark.parametrize("n", [2, 190])
@pytest.mark.parametrize("d", TURNS)
@pytest.mark.parametrize("p", TURNS)
def test_an_indexers_pages_go_from_any_turns_to_any(
    monkeypatch: pytest.MonkeyPatch, p: tuple[int, int], d: tuple[int, int], n: int
) -> None:
    gpu(monkeypatch, 9)
    one = engine(INDEXERS, 32, max(p[0], 2), turns=p, kernel=16) if p[0] != 3 else engine(INDEXERS, 32, 3, turns=p)
    two, whole = (engine(INDEXERS, 48, d[0] * 2, turns=d) for _ in range(2))
    src, dst = table(32 * p[0], n, 1), table(48 * d[0], n, 2)
    fill(one, INDEXERS, src, range(n))
    fill(whole, INDEXERS, dst, range(n))
    segregate(one)
    load(one, two, src, dst, 0, n - 1)
    segregate(two, back=True)
    fill(two, INDEXERS, dst, [n - 1])
    for got, expected in zip(two, whole, strict=True):
        assert torch.equal(got.memory, expected.memory)


@pytest.mark.parametrize("d", [(1, 1, 4), (2, 1, 4), (2, 16, 4), (4, 2, 8)])
@pytest.mark.parametrize("p", [(1, 1, 2), (2, 4, 4), (4, 1, 8)])
def test_full_attention_goes_from_any_turns_to_any(p: tuple[int, int, int], d: tuple[int, int, int]) -> None:
    """Two KV heads: ranks that hold the same head take turns with its tokens."""
    layers = {f"model.layers.{i}.attn": attention(2) for i in range(2)}
    hf = {"num_key_value_heads": 2}
    one = engine(layers, 32, p[2], "LHBNC", turns=p[:2], hf=hf)
    two, whole = (engine(layers, 16, d[2], "BLHNC", turns=d[:2], hf=hf) for _ in range(2))
    law(layers, one, two, whole, (32 * p[0], 16 * d[0]), 150)


def test_turns_longer_than_a_block_of_the_kernels_are_refused() -> None:
    with pytest.raises(ConfigError, match="cp-kv-cache-interleave-size"):
        engine(LATENTS, 64, 2, turns=(2, 64), kernel=16)


@pytest.mark.parametrize("sharded", [True, False])
def test_ranks_of_prefill_context_parallelism(sharded: bool) -> None:
    """With decode context parallelism they take turns, without it they hold the same."""
    ranks = 2 if sharded else 1
    one = engine(LATENTS, 32, 2, across=2, turns=(ranks, 1))
    two, whole = (engine(LATENTS, 48, 2) for _ in range(2))
    law(LATENTS, one, two, whole, (32 * ranks, 48), 190)


# --- which ranks take turns, as vLLM makes its groups


@pytest.mark.parametrize(
    ("tensor", "prefill", "decode"), [(4, 1, 2), (4, 1, 4), (8, 1, 2), (1, 2, 2), (2, 2, 2), (2, 2, 4), (1, 4, 4)]
)
def test_places_are_those_of_vllms_groups(tensor: int, prefill: int, decode: int) -> None:
    """``vllm/distributed/parallel_state.py``: ranks by pipeline, prefill context and tensor parallelism; a group of decode context
    parallelism is a row of the transposed table."""
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor,
            prefill_context_parallel_size=prefill,
            decode_context_parallel_size=decode,
            cp_kv_cache_interleave_size=4,
        )
    )
    ranks = torch.arange(prefill * tensor).reshape(1, 1, 1, prefill, tensor)
    found = [
        row.tolist().index(rank) for rank in range(prefill * tensor) for row in _groups(ranks, decode) if rank in row
    ]
    places = [Place.of(config, rank_of(config, 0, *divmod(rank, tensor))) for rank in range(prefill * tensor)]
    assert [place.turn for place in places] == found
    assert [place.tensor for place in places] == [Rank(0, rank % tensor) for rank in range(prefill * tensor)]
    spec = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=40, dtype=torch.bfloat16)
    assert places[1].turns(spec) == TokenTurns(places[1].turn, decode, 4)
    assert places[1].turns(_mamba()) is None


def _groups(ranks: torch.Tensor, decode: int) -> Any:
    return ranks.transpose(-1, -2).reshape(-1, decode).unbind(0)


def _mamba() -> MambaSpec:
    return MambaSpec(block_size=32, shapes=((16,),), dtypes=(torch.bfloat16,))


@pytest.mark.parametrize("ranks", [2, 3])
def test_groups_are_counted_as_in_the_block_tables(ranks: int) -> None:
    """By vLLM's own rule for what a block stands for."""
    from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_block_size

    full = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    for spec in (full, _mamba(), FullAttentionSpec(**{**vars(full), "dcp_sharded": False})):
        (found,) = group_pages(groups(spec), ranks)
        assert found.group.block_tokens == resolve_dcp_kv_block_size(spec, ranks)


# --- vLLM's scheduler


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("d", [1, 2, 4])
@pytest.mark.parametrize("stateful", [False, True])
def test_scheduler(make: Make, p: int, d: int, stateful: bool) -> None:
    """Blocks of as many tokens as ranks that take turns have together, on either side, beside states that all ranks have whole."""
    kinds = (Group(), Group(state=True, aligned=True)) if stateful else (Group(),)
    if stateful and p != d:
        pytest.skip("the engine that plays both keeps states of one size of blocks only")
    one, two = make(kinds, turns=p), make(kinds, turns=d)
    text = prompt(90)
    name = decode(two, text, prefill(one, text), one)
    assert two.computed[name] == 1 + 3
    again = decode(two, text, prefill(one, text), one)
    assert two.computed[again] <= BLOCK * d + 3
    check(two, again, text)
