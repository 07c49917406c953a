"""Which layers are a draft model's, by the names that vLLM gives them, and what becomes of their pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvxfer.geometry import Rank, route
from kvxfer_vllm.layout import Layout, draft_of

TARGET = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
EAGLE, MTP = "model.layers.2.self_attn.attn", "mtp.layers.2.self_attn.attn"
SMALLER = ["draft_model.model.layers.0.self_attn.attn", "draft_model.model.layers.1.self_attn.attn"]


def config(method: str | None, hidden: int = 64) -> Any:
    shape = SimpleNamespace(to_dict=lambda: {"num_key_value_heads": 2, "hidden_size": hidden})
    draft = SimpleNamespace(hf_config=shape, hf_text_config=shape, get_total_num_kv_heads=lambda: 2)
    return SimpleNamespace(
        speculative_config=None if method is None else SimpleNamespace(method=method, draft_model_config=draft),
        model_config=SimpleNamespace(
            get_total_num_hidden_layers=lambda: 2,
            get_total_num_kv_heads=lambda: 2,
            hf_text_config=shape,
            hf_config=shape,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )


@pytest.mark.parametrize("layer", [*TARGET, "language_model.model.layers.1.mixer", "model.embedding"])
def test_the_layers_of_the_model_itself(layer: str) -> None:
    assert draft_of(layer, config("eagle3")) == ""


@pytest.mark.parametrize("layer", [EAGLE, MTP, *SMALLER, "model.layers.10.self_attn.attn"])
def test_those_of_a_draft_model(layer: str) -> None:
    assert draft_of(layer, config("mtp")).startswith("mtp-")
    assert draft_of(layer, config("mtp")) == draft_of(layer, config("mtp"))
    assert draft_of(layer, config("mtp")) != draft_of(layer, config("mtp", hidden=32))
    assert draft_of(layer, config("mtp")) != draft_of(layer, config("eagle3"))


@pytest.mark.parametrize("layer", [*TARGET, *SMALLER])
def test_without_speculative_decoding_there_is_no_draft_model(layer: str) -> None:
    assert draft_of(layer, config(None)) == ""


def layout(drafts: list[str], of: Any) -> Layout:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    names = [*TARGET, *drafts]
    memory = torch.zeros(len(names), 6, 2, 16, 32, dtype=torch.bfloat16)
    return Layout.of(
        {n: memory[i] for i, n in enumerate(names)}, KVCacheConfig(6, [], [KVCacheGroupSpec(names, spec)]), of, Rank()
    )


@pytest.mark.parametrize(
    ("p", "d", "moved"),
    [
        (layout([EAGLE], config("eagle3")), layout([], config(None)), []),
        (layout([], config(None)), layout([EAGLE], config("eagle3")), []),
        (layout([EAGLE], config("eagle3")), layout([EAGLE], config("eagle3")), [EAGLE]),
        (layout([EAGLE], config("eagle3")), layout([EAGLE], config("eagle3", hidden=32)), []),
        (layout([EAGLE], config("eagle3")), layout([MTP], config("mtp")), []),
        (layout(SMALLER, config("draft_model")), layout([MTP], config("mtp")), []),
        (layout(SMALLER, config("draft_model")), layout(SMALLER, config("draft_model")), SMALLER),
    ],
)
def test_their_pages_are_moved_between_engines_with_the_same_one(p: Layout, d: Layout, moved: list[str]) -> None:
    """In a group with the model's own layers, of which all are moved in any case."""
    p.cache.check()
    (found,) = route([p.cache], [d.cache]).values()
    assert {layer for assignments in found.assignments.values() for c in assignments for layer in c.layers} == {
        *TARGET,
        *moved,
    }
