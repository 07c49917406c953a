"""What the catalogue says about an engine's KV-cache groups: which blocks each keeps, and how far back its tokens attend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from kvxfer.errors import ConfigError
from kvxfer.values import MAX_TOKENS, Group
from kvxfer_vllm.compat import takes_loaded_windows
from kvxfer_vllm.pages.catalogue import entry_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

__all__ = ["GroupPages", "group_pages", "layer_specs", "replays", "takes_turns"]

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
    if replays(spec) and not (getattr(group, "enable_kv_transfer", True) and takes_loaded_windows()):
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
