"""The catalogue of page kinds: complete for the vLLM that is installed, the same for both halves, and on the page of models."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1 import kv_cache_interface as interface
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvxfer.errors import ConfigError
from kvxfer.values import Group
from kvxfer_vllm.internals import TAKES_LOADED_WINDOWS, Layer
from kvxfer_vllm.pages.catalogue import CATALOGUE
from kvxfer_vllm.pages.forms import WRITERS, form_of, writer_of
from kvxfer_vllm.pages.groups import group_pages

ROOT = Path(__file__).parents[2]
ABSTRACT = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 16, "dtype": torch.bfloat16}


def groups(spec: Any, **more: Any) -> Any:
    given = {"layer_names": ["layer"], "kv_cache_spec": spec, "enable_kv_transfer": True, "host_resident": False}
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(**{**given, **more})])


LATER = set() if importlib.util.find_spec("vllm.models.step5") else {"Step5ForCausalLM"}
"""What only later releases know."""


def test_every_spec_of_vllm_is_in_the_catalogue() -> None:
    classes = {n for n, c in vars(interface).items() if isinstance(c, type) and issubclass(c, KVCacheSpec)}
    assert classes - ABSTRACT <= set(CATALOGUE)


def test_back_ends_are_where_the_catalogue_says() -> None:
    """Read, not imported: most need a GPU's libraries."""
    home = Path(next(iter(vllm.__path__)))
    for path in WRITERS:
        module, _, name = path.rpartition(".")
        file = home / f"{module.replace('.', '/')}.py"
        if LATER and not file.exists():
            assert module.startswith("models.step5."), path
            continue
        source = ast.parse(file.read_text())
        made = {n.name for n in source.body if isinstance(n, ast.ClassDef)}
        made |= {t.id for n in source.body if isinstance(n, ast.Assign) for t in n.targets if isinstance(t, ast.Name)}
        assert name in made, path


def test_entries_name_tests_that_are_there(models_table: Any) -> None:
    assert models_table.PAGES.keys() == CATALOGUE.keys()
    for shown in {p.shown for p in models_table.PAGES.values()} | {f.by for f in models_table.FAMILIES}:
        assert (ROOT / shown).is_file(), shown


def test_families_are_of_models_that_vllm_knows(models_table: Any) -> None:
    known = set(ModelRegistry.get_supported_archs()) | LATER
    for family in models_table.FAMILIES:
        assert set(family.architectures) <= known, family.name
        assert {spec for _, spec in family.groups} <= set(CATALOGUE), family.name


def test_the_page_of_models_is_up_to_date(models_table: Any) -> None:
    text = (ROOT / "docs/models.md").read_text()
    assert text == models_table.drawn(text), "run python docs/models_table.py"


@pytest.mark.parametrize("name", [e.spec for e in CATALOGUE.values() if e.kept == "refused"])
def test_what_is_refused_is_refused_by_name(name: str) -> None:
    cls = getattr(interface, name, None) or type(name, (), {"__module__": "vllm.v1.kv_cache_interface"})
    spec = object.__new__(cls)
    with pytest.raises(ConfigError, match=f"group 0: it holds {name}; {CATALOGUE[name].why}"):
        group_pages(groups(spec))


def test_what_no_other_engine_needs_stays_local() -> None:
    for more in ({"enable_kv_transfer": False}, {}):
        spec = FullAttentionSpec(**SHAPE) if more else interface.HiddenStateCacheSpec(**SHAPE)
        (group,) = group_pages(groups(spec, **more))
        assert group.group == Group(32, "local")


def test_what_lives_in_host_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="host's memory"):
        group_pages(groups(FullAttentionSpec(**SHAPE), host_resident=True))


class Replayed(SlidingWindowSpec):
    """As vLLM 0.32 has `SlidingWindowMLASpec` with `bounded_replay`, whatever the release."""

    prefix_replay_tokens = 8


def test_a_window_that_is_replayed_after_a_hit_is_moved_if_vllm_takes_it_for_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group that no load brings would be replayed behind one, too."""
    given = {**SHAPE, "sliding_window": 8}
    latent = interface.SlidingWindowMLASpec
    specs = [Replayed(**given), UniformTypeKVCacheSpecs(32, {"a": SlidingWindowSpec(**given), "b": Replayed(**given)})]
    if TAKES_LOADED_WINDOWS and "bounded_replay" in {field.name for field in dataclasses.fields(latent)}:
        specs.append(latent(**given, bounded_replay=True))
        (found,) = group_pages(groups(specs[-1]))
        assert found.group == Group(32, "window", 8)
    for spec in specs:
        with pytest.raises(ConfigError, match=r"group 0 \(.*replaying tokens.*set --no-swa-bounded-replay"):
            group_pages(groups(spec, enable_kv_transfer=False))
        monkeypatch.setattr("kvxfer_vllm.internals.TAKES_LOADED_WINDOWS", False)
        with pytest.raises(ConfigError, match=r"group 0 \(.*replaying tokens.*set --no-swa-bounded-replay"):
            group_pages(groups(spec))


@pytest.mark.parametrize(
    ("spec", "kind", "window"),
    [
        (FullAttentionSpec(**SHAPE), "full", 0),
        (FullAttentionSpec(**SHAPE, sliding_window=8), "full", 0),  # without the hybrid manager: all blocks are kept
        (SlidingWindowSpec(**SHAPE, sliding_window=8), "window", 8),
        (ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64), "window", 64),
        (MLAAttentionSpec(**SHAPE), "full", 0),
    ],
)
def test_how_groups_keep_their_blocks(spec: Any, kind: str, window: int) -> None:
    (group,) = group_pages(groups(spec))
    assert (group.group.kind, group.group.window) == (kind, window)


def test_a_group_that_keeps_blocks_in_two_ways_is_refused() -> None:
    both = {"a": FullAttentionSpec(**SHAPE), "b": SlidingWindowSpec(**SHAPE, sliding_window=8)}
    with pytest.raises(ConfigError, match=r"FullAttentionSpec, SlidingWindowSpec, which keep blocks in different ways"):
        group_pages(groups(UniformTypeKVCacheSpecs(32, both)))


def test_back_ends_that_vllm_derives_go_by_what_they_are_derived_from() -> None:
    derived = create_chunked_local_attention_backend(CPUAttentionBackend, 64)
    assert derived is not CPUAttentionBackend
    layers = [Layer(SimpleNamespace(get_attn_backend=lambda b=b: b)) for b in (CPUAttentionBackend, derived)]
    assert {WRITERS[writer_of(layer)] for layer in layers} == {"packed"}


@pytest.mark.parametrize("more", [{"get_impl_cls": lambda: None}, {"get_name": lambda: "CPU_ATTN"}])
def test_a_back_end_that_may_write_as_it_likes_is_not_known(more: dict[str, Any]) -> None:
    own = type("Own", (CPUAttentionBackend,), {"__module__": "somebodys.plugin", **more})
    assert writer_of(Layer(SimpleNamespace(get_attn_backend=lambda: own))) == ""
    assert form_of(FullAttentionSpec(**SHAPE), "") == "whole"


class Derived(SlidingWindowSpec):
    """Of a plug-in; vLLM keeps its blocks as it keeps a window's."""


class Strange(KVCacheSpec):
    """Of a plug-in that brings a manager of its own."""


def test_a_spec_that_nobody_knows_is_kept_as_its_manager_keeps_it() -> None:
    spec = Derived(**SHAPE, sliding_window=8)
    (group,) = group_pages(groups(spec))
    assert (group.group.kind, group.group.window) == ("window", 8)
    assert form_of(spec, next(w for w, form in WRITERS.items() if form == "kv")) == "whole"
    with pytest.raises(ConfigError, match="it holds Strange; kvxfer does not know how its blocks are kept"):
        group_pages(groups(Strange(32)))
