"""vLLM's tensors as a cache: recurrent states, and which of them engines of another size can take over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Incompatible, Planner, Rank, route
from kvxfer_vllm.layout import Layout

BLOCKS, PAGE = 6, 96
STATES = {"shapes": ((3, 8), (10,)), "dtypes": (torch.bfloat16, torch.float32)}  # 48 + 40 bytes in pages of 96


def cache(rank: int = 0, size: int = 1, layer: Any = None, **more: Any) -> Cache:
    spec = MambaSpec(**{"block_size": 2048, "page_size_padded": PAGE, **STATES, **more})
    names = ["layer.0", "layer.1"]
    kv = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(names, spec)])
    page = PAGE if layer is None else spec.page_size_bytes
    memory = torch.zeros(len(names) * BLOCKS * page, dtype=torch.int8)
    tensors = {n: memory[i * BLOCKS * page :][: BLOCKS * page].view(BLOCKS, 1, 1, page) for i, n in enumerate(names)}
    layers = SimpleNamespace(static_forward_context=dict.fromkeys(names, layer))
    config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=size), compilation_config=layers)
    out = Layout.of(tensors, kv, config, Rank(0, rank)).cache
    out.check()
    return out


CLAIMS = route([cache()], [cache()])[Rank(0, 0)].assignments[Rank(0, 0)]


def test_the_state_after_the_last_token_is_moved() -> None:
    runs = Planner(cache(), cache(), CLAIMS).plan([[4]], [[2]], 0, 700).runs()
    assert runs.length.tolist() == [88, 88]
    assert (runs.src - runs.src[0]).tolist() == (runs.dst - runs.dst[0]).tolist() == [0, BLOCKS * PAGE]
    assert runs.src[0] - runs.dst[0] == 2 * PAGE


def test_each_rank_takes_over_its_own_slice() -> None:
    routes = route([cache(rank, 2) for rank in range(2)], [cache(rank, 2) for rank in range(2)])
    assert {rank: list(found.assignments) for rank, found in routes.items()} == {
        r: [r] for r in (Rank(0, 0), Rank(0, 1))
    }


@pytest.mark.parametrize(("of", "to"), [(2, 1), (1, 2)])
def test_slices_do_not_make_a_whole(of: int, to: int) -> None:
    with pytest.raises(Incompatible, match="of 2 ranks"):
        route([cache(rank, of) for rank in range(of)], [cache(rank, to) for rank in range(to)])


@pytest.mark.parametrize(
    ("kind", "whole", "share"),
    [
        ("ShortConv", ((2, 8),), ((2, 4),)),
        ("MambaMixer2", ((2, 4 * 3 + 2 * 5), (4, 3, 5)), ((2, 2 * 3 + 2 * 5), (2, 3, 5))),
        ("MambaMixer", ((2, 8), (8, 3)), ((2, 4), (4, 3))),
        ("QwenGatedDeltaNetAttention", ((2, 8 + 8 + 6), (2, 3, 4)), ((2, 4 + 4 + 3), (1, 3, 4))),
        ("KimiGatedDeltaNetAttention", ((2, 8 + 8 + 8), (2, 4, 4)), ((2, 4 + 4 + 4), (1, 4, 4))),
        ("KimiK3DeltaAttention", ((2, 8 + 8 + 8), (2, 4, 4)), ((2, 4 + 4 + 4), (1, 4, 4))),
        ("SomebodysMixer", ((2, 8), (8, 3)), ((2, 4), (4, 3))),
    ],
)
def test_only_states_of_known_layers_fit_other_sizes(kind: str, whole: Any, share: Any) -> None:
    layer = type(kind, (), {"__module__": "vllm.layers", "norm": SimpleNamespace(n_groups=1)})()
    dtypes = (torch.float32,) * len(whole)
    known: dict[str, Any] = {"dtypes": dtypes, "page_size_padded": None, "layer": layer}
    one = [cache(shapes=whole, **known)]
    two = [cache(rank, 2, shapes=share, **known) for rank in range(2)]
    for p, d in ((one, two), (two, one)):
        if kind != "SomebodysMixer":
            assert set(route(p, d)) == {c.rank for c in d}
        else:
            with pytest.raises(Incompatible, match=r"vllm/state.*of . ranks"):
                route(p, d)


@pytest.mark.parametrize("more", [{"dtypes": (torch.float16, torch.float32)}, {"shapes": ((8, 3), (10,))}])
def test_other_states_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(Incompatible, match="vllm/state/MAMBA2"):
        Planner(cache(), cache(**more), CLAIMS)


def test_pages_too_small_for_their_states_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer\.0.*for 4088 bytes is not known"):
        cache(shapes=((3, 8), (1010,)), page_size_padded=4096)
