"""vLLM's cache tensors as a kvxfer ``Cache``: read from strides and specs, nothing guessed from sizes.

vLLM 0.29 and later hands out one ``[B, H, N, C]`` view for each layer (blocks, heads, tokens, content), whatever the
physical order; ``B`` counts kernel blocks, which may be smaller than the scheduler's logical blocks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Group, Heads, Rank, Region, View
from kvxfer.geometry.plan import Ints

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

from kvxfer_vllm import recurrent
from kvxfer_vllm.settings import layer_specs

__all__ = ["Layout", "expand"]


@dataclass(frozen=True)
class Layout:
    """A worker's cache, and for each group how many kernel blocks a logical block holds."""

    cache: Cache
    ratios: tuple[int, ...]

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor], kv: KVCacheConfig, config: VllmConfig, rank: Rank) -> Layout:
        """Describe the tensors that ``register_kv_caches`` was given. Raises ``ConfigError`` for what cannot be."""
        regions = _Regions()
        groups: list[Group] = []
        ratios: list[int] = []
        shapes: dict[tuple[Any, ...], list[tuple[str, int]]] = defaultdict(list)
        for g, group in enumerate(kv.kv_cache_groups):
            per_layer = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            present = [name for name in group.layer_names if name in tensors]
            ratio = {tensors[name].shape[0] // kv.num_blocks for name in present} or {1}
            if len(ratio) > 1:
                raise ConfigError(f"layers of KV-cache group {g} split their blocks differently: {sorted(ratio)}")
            ratios.append(ratio.pop())
            spec = layer_specs(group.kv_cache_spec)[0]
            window = getattr(spec, "sliding_window", None)
            kernel_tokens = group.kv_cache_spec.block_size // ratios[-1]
            if recurrent.is_state(spec):
                groups.append(Group(kernel_tokens, "state"))
            else:
                groups.append(Group(kernel_tokens, "window" if window else "full", int(window or 0)))
            for name in present:
                layer = per_layer[name] if per_layer is not None else group.kv_cache_spec
                for shape, offset in _planes(name, tensors[name], layer, g, kernel_tokens, config, rank, regions):
                    shapes[shape].append((name, offset))
        views = tuple(
            View(plane, g, tuple(n for n, _ in at), tuple(o for _, o in at), *rest)
            for (plane, g, *rest), at in shapes.items()
        )
        return cls(Cache(regions.found, tuple(groups), views, rank), tuple(ratios))

    def tables(self, tables: tuple[tuple[int, ...], ...]) -> tuple[Ints, ...]:
        """Logical block tables as kernel block tables."""
        return tuple(expand(t, r) for t, r in zip(tables, self.ratios, strict=True))


def expand(table: tuple[int, ...], ratio: int) -> Ints:
    """Block ids of kernel blocks: logical block b is the kernel blocks b * ratio and the ratio - 1 that follow."""
    ids = np.asarray(table, dtype=np.int64)
    if ratio == 1:
        return ids
    wide = ids[:, None] * ratio + np.arange(ratio, dtype=np.int64)
    wide[ids < 0] = -1
    return wide.ravel()


class _Regions:
    """Storages found so far; vLLM backs all layers with one."""

    def __init__(self) -> None:
        self.found: tuple[Region, ...] = ()

    def offset(self, tensor: torch.Tensor) -> int:
        """Flat offset of the tensor's first element."""
        storage = tensor.untyped_storage()
        device = "cpu" if tensor.device.type == "cpu" else f"{tensor.device.type}:{tensor.device.index or 0}"
        region = Region(storage.data_ptr(), storage.nbytes(), device)
        if region not in self.found:
            self.found += (region,)
        start = Cache(self.found, (), ()).starts[self.found.index(region)]
        return start + tensor.data_ptr() - region.address


def _planes(
    name: str,
    t: torch.Tensor,
    spec: Any,
    group: int,
    tokens: int,
    config: VllmConfig,
    rank: Rank,
    regions: _Regions,
) -> list[tuple[tuple[Any, ...], int]]:
    """(everything of a view that layers may share, the layer's offset) for each plane of one layer."""
    if recurrent.is_state(spec):
        return [_state(name, t, spec, group, config, rank, regions)]
    item = t.element_size()
    blocks, slots, states, content = t.shape
    if t.dim() != 4 or states != tokens or t.stride(3) != 1:
        raise ConfigError(f"layer {name!r}: a cache of shape {tuple(t.shape)} of {tokens} tokens a block is not known")
    stride, head, token = (s * item for s in t.stride()[:3])
    offset = regions.offset(t)
    quant = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    kind = "mla" if "MLA" in type(spec).__name__ else "attention"
    encoding = f"vllm/{kind}/{str(spec.dtype).removeprefix('torch.')}/{quant}"
    heads = None if kind == "mla" else _heads(name, spec, slots, head, config, rank)

    def shape(plane: str, unit: int, encoding: str, token: int | None) -> tuple[Any, ...]:
        return plane, group, blocks, stride, unit, encoding, heads, token

    if t.device.type == "cpu":  # each (block, head) is packed for the instruction set: not to be cut by token
        if head != states * content * item:
            raise ConfigError(f"layer {name!r}: the pages of CPU attention are not contiguous by head")
        return [(shape("kv", head, f"{encoding}/cpu/{_isa()}/{states}x{content}", None), offset)]
    k, v = spec.head_size * item, getattr(spec, "head_size_v", spec.head_size) * item
    if kind == "attention" and quant == "NONE" and k + v == content * item:
        return [(shape("k", k, encoding, token), offset), (shape("v", v, encoding, token), offset + k)]
    return [(shape("latent" if kind == "mla" else "kv", content * item, encoding, token), offset)]


def _state(
    name: str, t: torch.Tensor, spec: Any, group: int, config: VllmConfig, rank: Rank, regions: _Regions
) -> tuple[tuple[Any, ...], int]:  # fmt: skip
    """Pages whose content only the layer knows. Each rank of a tensor-parallel engine holds a slice of its own, which fits
    no other slice: the ranks stand where others have heads."""
    size, nbytes = config.parallel_config.tensor_parallel_size, int(spec.state_content_size_bytes)
    if t.dim() != 4 or t.shape[1:3] != (1, 1) or t.stride(3) != 1 or t.shape[3] * t.element_size() < nbytes:
        raise ConfigError(f"layer {name!r}: a state cache of shape {tuple(t.shape)} for {nbytes} bytes is not known")
    heads = None if getattr(spec, "tp_replicated", False) else Heads(rank.tp, 1, size, nbytes)
    stride = t.stride(0) * t.element_size()
    return ("state", group, t.shape[0], stride, nbytes, recurrent.encoding(spec), heads, None), regions.offset(t)


def _heads(name: str, spec: Any, slots: int, stride: int, config: VllmConfig, rank: Rank) -> Heads:
    """The range of the model's KV heads that this rank holds; ranks beyond their number hold replicas."""
    if slots != spec.num_kv_heads:
        raise ConfigError(f"layer {name!r}: {slots} head slots for {spec.num_kv_heads} heads are not supported")
    size = config.parallel_config.tensor_parallel_size
    total = max(config.model_config.get_total_num_kv_heads(), spec.num_kv_heads)
    start = rank.tp * spec.num_kv_heads if size <= total else rank.tp * total // size
    return Heads(start, spec.num_kv_heads, total, stride)


def _isa() -> str:
    """What the CPU kernels pack for on this machine."""
    import torch

    cpu = torch.cpu
    if getattr(cpu, "_is_amx_tile_supported", lambda: False)():
        return "amx"
    if getattr(cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "avx512bf16"
    return torch.backends.cpu.get_cpu_capability().lower()
