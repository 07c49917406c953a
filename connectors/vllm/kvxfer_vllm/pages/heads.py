"""How many KV heads a layer has in all; this rank holds some of them. The number may differ from layer to layer of one model.

vLLM gives each rank ``max(1, total // ranks)`` heads. So if a rank has several heads, the total follows. If it has one, there are
as many heads as ranks, or fewer, so that several ranks hold replicas of one head. The model's configuration tells which: of the
numbers of heads that it names for layers of this kind, those that fit are considered. Unless exactly one fits, the total is not
known, and a rank's heads go to the same rank of an engine of the same size. A mistake here could not go unnoticed: each side finds
the total by itself, from its own number of ranks, and they refuse each other if the totals differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["total_heads"]

_KEY = re.compile(
    r"(?:^|_)(?:num_key_value_heads|num_kv_heads|n_kv_heads|n_head_kv|kv_n_heads|multi_query_group_num|"
    r"num_attention_groups|num_query_groups)$"
)
_WINDOW = re.compile(r"swa|sliding|local|window")
_FULL = re.compile(r"global|full")


def total_heads(name: str, layer: Any, spec: Any, config: VllmConfig) -> int | None:
    """Return the number of a layer's KV heads, with replicas counted once; ``None`` if it is not certain."""
    ranks, own = int(config.parallel_config.tensor_parallel_size), int(spec.num_kv_heads)
    shards = getattr(spec, "max_tp_shards", None)
    if shards is not None:
        return own * min(ranks, int(shards))
    if own > 1 or ranks == 1:
        return own * ranks
    named = _of_layer(name, config) or _of_kind(_sees_window(layer, spec), config)
    fitting = {n for n in named if max(1, n // ranks) == own and not (n % ranks and ranks % n)}
    return fitting.pop() if len(fitting) == 1 else None


def _sees_window(layer: Any, spec: Any) -> bool:
    """Return whether a layer has a window. Without the hybrid manager all layers may have one spec, which names the window of some."""
    return bool(getattr(layer, "sliding_window", getattr(spec, "sliding_window", None)))


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
