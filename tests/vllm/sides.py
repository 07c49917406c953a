"""Engines of tensors alone: the caches that vLLM would hand to ``register_kv_caches``, for all ranks, and loads between
two such engines along real plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, UniformTypeKVCacheSpecs

from kvxfer.geometry import Planner, Rank, route
from kvxfer.values import BlockTable
from kvxfer_vllm.layout import Layout
from tests.geometry.layouts import dealt

BLOCKS = 12

Write = Callable[[torch.Tensor, Any, Sequence[int], int, int, np.ndarray], None]
"""Write tokens into one layer's cache: (``[B, H, N, C]``, spec, block table, rank, ranks, positions)."""


@dataclass(frozen=True)
class Layer:
    """A layer of a test: its spec at a number of ranks and tokens a block, what vLLM's object says of it, who writes."""

    spec: Callable[[int, int], Any]
    write: Write
    backend: type | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass
class Side:
    """One rank's memory, cache tensors and layout."""

    memory: torch.Tensor
    tensors: dict[str, torch.Tensor]
    specs: dict[str, Any]
    layout: Layout
    rank: int
    size: int
    turn: tuple[int, int, int]


class OnGpu:
    """A tensor that says that it lies on a GPU; a ``Layout`` reads only where and how it lies."""

    device = torch.device("cuda:0")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def backend(path: str) -> type:
    """A stand-in for a back end that cannot be imported here: what matters of it is how vLLM calls it and where it is."""
    module, _, name = path.rpartition(".")
    return type(name, (), {"__module__": f"vllm.{module}", "get_name": staticmethod(lambda: name)})


def engine(
    layers: dict[str, Layer],
    block: int,
    size: int = 1,
    order: str = "LBHNC",
    *,
    kernel: int | None = None,
    hf: Any = None,
    shared: dict[str, str] | None = None,
    cache_dtype: str = "auto",
    turns: tuple[int, int] = (1, 1),
    across: int = 1,
) -> list[Side]:
    """All ranks of an engine whose layers make one group.

    Args:
        layers: by name.
        block: tokens of a logical block.
        size: ranks.
        order: the axes of a cache in memory, outermost first; L stands for the layers of one spec.
        kernel: tokens of a kernel block, if other than ``block``.
        hf: the model's configuration.
        shared: layers that read the cache of another.
        cache_dtype: what the user asked for.
        turns: how many ranks take turns with the tokens of a block (decode context parallelism), and the tokens of a turn.
        across: ranks of prefill context parallelism.
    """
    sides = []
    for rank in range(size * across):
        specs = {name: layer.spec(size, block) for name, layer in layers.items()}
        pages = [_slots(s) * (block // getattr(s, "tokens_per_state", 1)) * _cell(s) for s in specs.values()]
        memory = torch.zeros(BLOCKS * sum(pages), dtype=torch.uint8)
        tensors, at = {}, 0
        for spec in dict.fromkeys(specs.values()):  # layers of one spec lie side by side
            names = [n for n in specs if specs[n] == spec]
            ratio = block // (kernel or block)
            shape = {
                "L": len(names),
                "B": BLOCKS * ratio,
                "H": _slots(spec),
                "N": (kernel or block) // getattr(spec, "tokens_per_state", 1),
                "C": _cell(spec),
            }
            strides, step = {}, 1
            for axis in reversed(order):
                strides[axis] = step
                step *= shape[axis]
            for i, name in enumerate(names):
                view = torch.as_strided(
                    memory, [shape[a] for a in "BHNC"], [strides[a] for a in "BHNC"], at + i * strides["L"]
                )
                tensors[name] = view.view(spec.dtype)
            at += step
        group = KVCacheGroupSpec([*specs], _group(specs, block))
        objects = {name: _object(layer) for name, layer in layers.items()}
        for name, target in (shared or {}).items():
            group.layer_names.append(name)
            tensors[name] = tensors[target]
            objects[name] = objects[target]
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=size,
                prefill_context_parallel_size=across,
                decode_context_parallel_size=turns[0],
                cp_kv_cache_interleave_size=turns[1],
            ),
            model_config=_model(hf),
            compilation_config=SimpleNamespace(static_forward_context=objects),
            cache_config=SimpleNamespace(cache_dtype=cache_dtype),
            attention_config=SimpleNamespace(indexer_kv_dtype=None),
            speculative_config=None,
        )
        on_cpu = any("CPU" in getattr(layer.backend, "__name__", "") for layer in layers.values())
        seen: Any = tensors if on_cpu else {name: OnGpu(t) for name, t in tensors.items()}
        layout = Layout.of(seen, KVCacheConfig(BLOCKS, [], [group]), config, Rank(0, rank))
        layout.cache.check()
        turn = (rank % size * across + rank // size) % turns[0]
        sides.append(Side(memory, tensors, specs, layout, rank % size, size, (turn, *turns)))
    return sides


def fill(
    sides: list[Side], layers: dict[str, Layer], table: Sequence[int], positions: Sequence[int] | np.ndarray
) -> None:
    """Have the writers write tokens into every rank's cache."""
    for side in sides if len(positions) else ():
        expanded = side.layout.table(BlockTable.of([table]))[0]
        for name, layer in layers.items():
            if side.turn[1] > 1:
                _write_own(side, name, layer, expanded, positions)
                continue
            at = np.asarray(positions, np.int64)
            layer.write(side.tensors[name], side.specs[name], expanded, side.rank, side.size, at)


def _write_own(side: Side, name: str, layer: Layer, table: np.ndarray, positions: Sequence[int] | np.ndarray) -> None:
    """Have one rank write the tokens that are dealt to it: first all of them as if they were the first ones of a request that
    nobody shares, then each from there to the slot that is the next of this rank's."""
    t, mine = side.tensors[name], dealt(*side.turn)
    tokens = [p for p in positions if p in mine]
    if not tokens:
        return
    n, last = t.shape[2], max(tokens) + 1
    wide = torch.zeros(-(-last // n), *t.shape[1:], dtype=t.dtype)
    layer.write(wide, side.specs[name], np.arange(len(wide)), side.rank, side.size, np.array(tokens))
    for p in tokens:
        t[int(table[mine[p] // n]), :, mine[p] % n] = wide[p // n, :, p % n]


def load(p: list[Side], d: list[Side], src: Sequence[int], dst: Sequence[int], start: int, tokens: int) -> None:
    """Copy along the plans between all ranks. Raises ``Incompatible`` where the caches cannot be converted."""
    caches = {side.layout.cache.rank: side for side in p}
    routes = route([s.layout.cache for s in p], [s.layout.cache for s in d])
    for side in d:
        for rank, assignments in routes[side.layout.cache.rank].assignments.items():
            if not assignments:
                continue
            of = caches[rank]
            runs = (
                Planner(of.layout.cache, side.layout.cache, assignments)
                .plan(of.layout.table(BlockTable.of([src])), side.layout.table(BlockTable.of([dst])), start, tokens)
                .runs()
            )
            a, b = of.memory.numpy(), side.memory.numpy()
            for s, t, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
                b[t : t + n] = a[s : s + n]


def table(block: int, tokens: int, seed: int) -> list[int]:
    """Blocks for so many tokens, in no order; 0 is never among them."""
    return (1 + np.random.default_rng(seed).permutation(BLOCKS - 1)[: -(-tokens // block)]).tolist()


def law(
    layers: dict[str, Layer],
    p: list[Side],
    d: list[Side],
    whole: list[Side],
    sizes: tuple[int, int],
    n: int,
    start: int = 0,
) -> None:
    """A consumer that loads tokens ``[start, n - 1)`` and computes the others itself holds, byte for byte, what it would
    hold had it computed all of them (``whole``: the same engine, empty)."""
    (bp, bd), src, dst = sizes, table(sizes[0], n, 1), table(sizes[1], n, 2)
    assert bp * len(src) >= n and bd * len(dst) >= n
    fill(p, layers, src, range(n))
    fill(whole, layers, dst, range(n))
    fill(d, layers, dst, range(start))
    load(p, d, src, dst, start, n - 1)
    fill(d, layers, dst, [n - 1])
    for got, expected in zip(d, whole, strict=True):
        different = torch.nonzero(got.memory != expected.memory)
        assert not len(different), f"{len(different)} bytes differ, the first at {int(different[0])}"


def _group(specs: dict[str, Any], block: int) -> Any:
    first = next(iter(specs.values()))
    return first if all(s == first for s in specs.values()) else UniformTypeKVCacheSpecs(block, specs)


def _slots(spec: Any) -> int:
    return getattr(spec, "num_head_slots", None) or spec.num_kv_heads


def _cell(spec: Any) -> int:
    given = getattr(spec, "state_content_bytes", None)
    return int(given or (spec.head_size + spec.head_size_v) * torch.empty(0, dtype=spec.dtype).element_size())


def _object(layer: Layer) -> Any:
    return SimpleNamespace(get_attn_backend=lambda: layer.backend, **layer.more) if layer.backend else SimpleNamespace()


def _model(hf: Any) -> Any:
    given = hf or {"num_key_value_heads": 1}
    text = SimpleNamespace(to_dict=lambda: given) if isinstance(given, dict) else given
    total = given["num_key_value_heads"] if isinstance(given, dict) else given.to_dict()["num_key_value_heads"]
    return SimpleNamespace(hf_text_config=text, hf_config=text, get_total_num_kv_heads=lambda: total)
