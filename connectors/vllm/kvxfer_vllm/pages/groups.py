"""Recurrent states as planes. For a few kinds of layer it is known which part a rank holds, so that numbers of ranks may differ.

A page holds a layer's states one after the other: the last inputs of a short convolution and, for most kinds of layer, a matrix for
each head. Ranks divide the heads among them in order, and likewise the channels of each section of the convolution. vLLM's own
layers are listed here by their classes, with the sections that their weights are cut into. Each row of the convolution is a plane
of its own, and its channels take the place of heads, so that either of vLLM's two orders can be moved into the other. After the
rows for inputs, vLLM keeps rows for drafts, which no other engine needs.

The states of any other layer go to the same rank of an engine of the same size, unless all ranks hold the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import kvxfer_vllm.internals as internals
from kvxfer.errors import ConfigError
from kvxfer.geometry import Heads, Rank
from kvxfer.values import MAX_TOKENS, Group
from kvxfer_vllm.internals import Layer, channels_outside
from kvxfer_vllm.pages.catalogue import entry_of
from kvxfer_vllm.pages.forms import dtype_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_ANY_LENGTH = MAX_TOKENS
"""What the only block of a request stands for, however long that is."""


@dataclass(frozen=True)
class GroupPages:
    """One group of an engine."""

    # the group as the scheduler's block table has it. For chunked attention, the window is the length of a chunk.
    # ``local`` if its blocks never leave the engine
    group: Group
    specs: tuple[Any, ...]  # the specs of its layers; a uniform group has one for all of them


def group_pages(kv_cache_config: KVCacheConfig, ranks: int = 1) -> tuple[GroupPages, ...]:
    """Classify all groups.

    Args:
        kv_cache_config: vLLM's own.
        ranks: How many ranks take turns with the tokens of each block (decode context parallelism).

    Raises:
        ConfigError: One is not supported; the message names it and its specs.
    """
    found = (_classify(i, group) for i, group in enumerate(kv_cache_config.kv_cache_groups))
    return tuple(_of_all(pages, ranks) if ranks > 1 else pages for pages in found)


def replays(spec: Any) -> bool:
    """Return whether vLLM computes a group's window again behind a prefix hit, by replaying tokens, and does not keep it for hits."""
    return bool(getattr(spec, "prefix_replay_tokens", 0))


def takes_turns(spec: Any) -> bool:
    """Return whether the ranks of context parallelism take turns with the tokens of such a cache; else each has them all."""
    return bool(getattr(spec, "dcp_sharded", False)) and entry_of(spec).kept != "ring"


def _of_all(pages: GroupPages, ranks: int) -> GroupPages:
    """Return a group as the block tables have it: a block stands for the tokens of all ranks that take turns."""
    if not takes_turns(pages.specs[0]):
        return pages
    group = pages.group
    return GroupPages(Group(group.block_tokens * ranks, group.kind, group.window), pages.specs)


def layer_specs(spec: Any) -> tuple[Any, ...]:
    """Return the specs of a group's layers; a uniform group has one for all of them."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return tuple(per_layer.values()) if per_layer is not None else (spec,)


def _classify(i: int, group: KVCacheGroupSpec) -> GroupPages:
    spec = group.kv_cache_spec
    specs = layer_specs(spec)
    names = ", ".join(sorted({type(s).__name__ for s in specs}))
    if getattr(group, "host_resident", False):
        raise ConfigError(f"kvxfer does not support KV-cache group {i} ({names}): it lives in the host's memory")
    if replays(spec) and not (getattr(group, "enable_kv_transfer", True) and internals.TAKES_LOADED_WINDOWS):
        # vLLM would compute tokens again that it has counted as loaded.
        raise ConfigError(
            f"kvxfer does not support KV-cache group {i} ({names}): vLLM does not keep its window for prefix hits"
            ", but computes it again by replaying tokens, also behind a load; set --no-swa-bounded-replay"
        )
    if not getattr(group, "enable_kv_transfer", True):
        return GroupPages(Group(spec.block_size, "local"), specs)
    entries = {e.spec: e for e in map(entry_of, specs)}
    for entry in entries.values():
        if entry.kept == "refused":
            raise ConfigError(f"kvxfer does not support KV-cache group {i}: it holds {names}; {entry.why}")
    kept = {e.kept for e in entries.values()}
    windows = {_window(s, entries[type(s).__name__].kept) for s in specs}
    if len(kept) > 1 or len(windows) > 1:
        raise ConfigError(
            f"kvxfer does not support KV-cache group {i}: it holds {names}, which keep blocks in different ways "
            f"({', '.join(sorted(kept))}; windows of {sorted(windows)} tokens)"
        )
    kind = kept.pop()
    assert kind != "refused"
    if kind == "ring":
        return GroupPages(Group(_ANY_LENGTH, "state"), specs)
    as_grouped: Literal["full", "window", "state", "local"] = "window" if kind == "chunk" else kind
    return GroupPages(Group(spec.block_size, as_grouped, windows.pop()), specs)


def _window(spec: Any, kept: str) -> int:
    """Return the most tokens that a token attends to, itself included; 0 if there is no limit.

    Where vLLM runs without its hybrid manager, a full group may hold layers with a window. vLLM keeps all their blocks, so
    they count as full here. In chunked attention a token attends to its chunk up to itself, so at most to a chunk's length.
    """
    if kept == "window":
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if kept == "chunk" else 0


_KEY = re.compile(
    r"(?:^|_)(?:num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv|kv_n_heads|multi_query_group_num|"
    r"num_attention_groups|num_query_groups)$"
)
_WINDOW = re.compile(r"swa|sliding|local|window")
_FULL = re.compile(r"global|full")


def total_heads(name: str, layer: Layer, spec: Any, config: VllmConfig) -> int | None:
    """Return the number of a layer's KV heads, with replicas counted once; ``None`` if it is not certain."""
    ranks, own = int(config.parallel_config.tensor_parallel_size), int(spec.num_kv_heads)
    shards = getattr(spec, "max_tp_shards", None)
    if shards is not None:
        return own * min(ranks, int(shards))
    if own > 1 or ranks == 1:
        return own * ranks
    named = _of_layer(name, config) or _of_kind(layer.sees_window(spec), config)
    fitting = {n for n in named if max(1, n // ranks) == own and not (n % ranks and ranks % n)}
    return fitting.pop() if len(fitting) == 1 else None


def _of_layer(name: str, config: VllmConfig) -> set[int]:
    """Return what a configuration that has a part for each layer says about this one."""
    text, index = config.model_config.hf_text_config, re.findall(r"\.(\d+)\.", name)
    if len(index) != 1:
        return set()
    at = int(index[0])
    try:
        if getattr(text, "is_heterogeneous", False):  # transformers' own form
            return {int(text.per_layer_config[at].num_key_value_heads)}
        return {text.num_attention_heads // int(text.block_configs[at].attention.n_heads_in_group)}  # Nemotron NAS
    except (AttributeError, IndexError, KeyError, TypeError):
        return set()


def _of_kind(window: bool, config: VllmConfig) -> set[int]:
    """Return the numbers of heads that the configurations of the model, and of a draft model if there is one, name for such layers."""
    drafter = getattr(getattr(config, "speculative_config", None), "draft_model_config", None)
    found: set[int] = set()
    for model in (config.model_config, drafter):
        if model is None:
            continue
        numbers = list(_numbers(model.hf_text_config.to_dict()))
        ours, other = (_WINDOW, _FULL) if window else (_FULL, _WINDOW)
        marked = {n for key, n in numbers if ours.search(key)}
        plain = {n for key, n in numbers if not ours.search(key) and not other.search(key)}
        found |= marked or plain | {model.get_total_num_kv_heads()}
    return {n for n in found if n > 0}


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield (path, number) for each number of KV heads in a configuration."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner, path)
    elif isinstance(value, int) and not isinstance(value, bool) and _KEY.search(path.rpartition(".")[2]):
        yield path, value


_DELTA = frozenset({"QwenGatedDeltaNetAttention", "KimiGatedDeltaNetAttention", "KimiK3DeltaAttention"})
"""Layers whose convolution has the channels of queries, of as many keys, and of values."""


@dataclass(frozen=True)
class Piece:
    """One plane of a layer.

    ``offset``: bytes from the start of a page; ``unit``: bytes of one head, or of the whole plane if it has no heads; ``token``: bytes
    from one token to the next, ``None`` if it is not rows of tokens.
    """

    plane: str
    unit: int
    encoding: str
    heads: Heads | None
    offset: int = 0
    token: int | None = None


def state_pieces(layer: Layer, spec: Any, rank: Rank, size: int, device: str) -> list[Piece]:
    """Return the planes of a layer's states on one of ``size`` tensor-parallel ranks.

    ``device`` is the sort of device whose kernels write the states.
    """
    sections = _sections(layer, spec, rank.tp, size)
    if sections is None:
        return [_whole(spec, rank, size, device)]
    kind = f"vllm/state/{layer.kind}"
    item = spec.dtypes[0].itemsize
    channels = sum(s.count for s in sections)
    rows = prod(spec.shapes[0]) // channels
    outside = channels_outside()
    row, channel = (item, rows * item) if outside else (channels * item, item)
    # With drafts, GPU kernels keep the inputs in the first rows; CPU kernels need not.
    kept = rows - (layer.drafts or 0) if device == "cuda" else rows
    encoding = f"{kind}/inputs/{dtype_name(spec.dtypes[0])}/{kept}/{device}"
    out, first = [], 0
    for s, section in enumerate(sections):
        heads = Heads(section.start, section.count, section.total, channel)
        out += [Piece(f"inputs {s}.{r}", item, encoding, heads, first * channel + r * row) for r in range(kept)]
        first += section.count
    if len(spec.shapes) > 1:
        own, *shape = spec.shapes[1]
        unit = prod(shape) * spec.dtypes[1].itemsize
        encoding = f"{kind}/state/{dtype_name(spec.dtypes[1])}/{'x'.join(map(str, shape))}/{device}"
        out.append(Piece("state", unit, encoding, Heads(rank.tp * own, own, size * own, unit), rows * channels * item))
    return out


@dataclass(frozen=True)
class _Section:
    """Channels ``[start, start + count)`` of ``total``."""

    start: int
    count: int
    total: int


def _sections(layer: Layer, spec: Any, rank: int, size: int) -> list[_Section] | None:
    """Return the sections of a layer's convolution; ``None`` if they are not certain."""
    kind, shapes = layer.kind, spec.shapes
    if not kind or getattr(spec, "tp_replicated", False) or len(shapes[0]) != 2:
        return None
    channels = shapes[0][0 if channels_outside() else 1]
    matrix: tuple[int, ...] = shapes[1] if len(shapes) == 2 else ()
    if kind == "ShortConv" and len(shapes) == 1:
        cut = [channels]
    elif kind == "MambaMixer" and len(matrix) == 2 and matrix[0] == channels:
        cut = [channels]
    elif kind == "MambaMixer2" and len(matrix) == 3:
        inner = matrix[0] * matrix[1]
        return _beside_groups(layer, inner, channels - inner, matrix[2], rank, size)
    elif kind in _DELTA and len(matrix) == 3:
        values = matrix[0] * matrix[1]
        keys, odd = divmod(channels - values, 2)
        if keys <= 0 or odd:
            return None
        cut = [keys, keys, values]
    else:
        return None
    return [_Section(rank * n, n, size * n) for n in cut]


def _beside_groups(layer: Layer, inner: int, rest: int, state: int, rank: int, size: int) -> list[_Section] | None:
    """Return the sections of Mamba 2: inputs, B and C. If there is one group for all heads, each rank holds a replica of it."""
    of_group, odd = divmod(rest, 2)
    groups = 1 if size == 1 else layer.groups
    if of_group <= 0 or odd or of_group % state or groups is None or (groups != 1 and groups % size):
        return None
    replicas = groups == 1 and size > 1
    each = _Section(0, of_group, of_group) if replicas else _Section(rank * of_group, of_group, size * of_group)
    return [_Section(rank * inner, inner, size * inner), each, each]


def _whole(spec: Any, rank: Rank, size: int, device: str) -> Piece:
    states = zip(spec.shapes, spec.dtypes, strict=True)
    parts = ",".join(f"{'x'.join(map(str, shape))}:{dtype_name(dtype)}" for shape, dtype in states)
    order = "channels first" if channels_outside() else "rows first"
    name = getattr(spec.mamba_type, "name", spec.mamba_type)
    encoding = f"vllm/state/{name}/{parts}/{order}/{device}"
    nbytes = int(spec.state_content_size_bytes)
    if getattr(spec, "tp_replicated", False):
        return Piece("state", nbytes, f"{encoding}/on all ranks", None)
    return Piece("state", nbytes, f"{encoding}/of {size} ranks", Heads(rank.tp, 1, size, nbytes))
