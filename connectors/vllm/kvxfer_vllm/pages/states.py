"""Recurrent states as planes. For a few kinds of layer it is known which part a rank holds, so that numbers of ranks may differ.

A page holds a layer's states one after the other: the last inputs of a short convolution and, for most kinds of layer, a matrix for
each head. Ranks divide the heads among them in order, and likewise the channels of each section of the convolution. vLLM's own
layers are listed here by their classes, with the sections that their weights are cut into. Each row of the convolution is a plane
of its own, and its channels take the place of heads, so that either of vLLM's two orders can be moved into the other. After the
rows for inputs, vLLM keeps rows for drafts, which no other engine needs.

The states of any other layer go to the same rank of an engine of the same size, unless all ranks hold the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from kvxfer.geometry import Heads, Rank

__all__ = ["Piece", "state_pieces"]

_DELTA = frozenset({"QwenGatedDeltaNetAttention", "KimiGatedDeltaNetAttention", "KimiK3DeltaAttention"})
"""Layers whose convolution has the channels of queries, of as many keys, and of values."""


@dataclass(frozen=True)
class Piece:
    """One plane of a layer.

    ``offset``: bytes from the start of a page; ``unit``: bytes of one head, or of the whole plane if it has no heads.
    """

    plane: str
    unit: int
    encoding: str
    heads: Heads | None
    offset: int = 0


def state_pieces(layer: Any, spec: Any, rank: Rank, size: int, device: str) -> list[Piece]:
    """Return the planes of a layer's states on one of ``size`` tensor-parallel ranks.

    ``layer`` is vLLM's layer object, or ``None``; ``device`` is the sort of device whose kernels write the states.
    """
    sections = _sections(layer, spec, rank.tp, size)
    if sections is None:
        return [_whole(spec, rank, size, device)]
    kind = f"vllm/state/{type(layer).__name__}"
    item = spec.dtypes[0].itemsize
    channels = sum(s.count for s in sections)
    rows = prod(spec.shapes[0]) // channels
    outside = _channels_outside()
    row, channel = (item, rows * item) if outside else (channels * item, item)
    # With drafts, GPU kernels keep the inputs in the first rows; CPU kernels need not.
    kept = rows - layer.num_spec if device == "cuda" and hasattr(layer, "num_spec") else rows
    encoding = f"{kind}/inputs/{_plain(spec.dtypes[0])}/{kept}/{device}"
    out, first = [], 0
    for s, section in enumerate(sections):
        heads = Heads(section.start, section.count, section.total, channel)
        out += [Piece(f"inputs {s}.{r}", item, encoding, heads, first * channel + r * row) for r in range(kept)]
        first += section.count
    if len(spec.shapes) > 1:
        own, *shape = spec.shapes[1]
        unit = prod(shape) * spec.dtypes[1].itemsize
        encoding = f"{kind}/state/{_plain(spec.dtypes[1])}/{'x'.join(map(str, shape))}/{device}"
        out.append(Piece("state", unit, encoding, Heads(rank.tp * own, own, size * own, unit), rows * channels * item))
    return out


@dataclass(frozen=True)
class _Section:
    """Channels ``[start, start + count)`` of ``total``."""

    start: int
    count: int
    total: int


def _sections(layer: Any, spec: Any, rank: int, size: int) -> list[_Section] | None:
    """Return the sections of a layer's convolution; ``None`` if they are not certain."""
    kind, shapes = type(layer), spec.shapes
    if not kind.__module__.startswith("vllm.") or getattr(spec, "tp_replicated", False) or len(shapes[0]) != 2:
        return None
    channels = shapes[0][0 if _channels_outside() else 1]
    matrix: tuple[int, ...] = shapes[1] if len(shapes) == 2 else ()
    if kind.__name__ == "ShortConv" and len(shapes) == 1:
        cut = [channels]
    elif kind.__name__ == "MambaMixer" and len(matrix) == 2 and matrix[0] == channels:
        cut = [channels]
    elif kind.__name__ == "MambaMixer2" and len(matrix) == 3:
        inner = matrix[0] * matrix[1]
        return _beside_groups(layer, inner, channels - inner, matrix[2], rank, size)
    elif kind.__name__ in _DELTA and len(matrix) == 3:
        values = matrix[0] * matrix[1]
        keys, odd = divmod(channels - values, 2)
        if keys <= 0 or odd:
            return None
        cut = [keys, keys, values]
    else:
        return None
    return [_Section(rank * n, n, size * n) for n in cut]


def _beside_groups(layer: Any, inner: int, rest: int, state: int, rank: int, size: int) -> list[_Section] | None:
    """Return the sections of Mamba 2: inputs, B and C. If there is one group for all heads, each rank holds a replica of it."""
    of_group, odd = divmod(rest, 2)
    groups = 1 if size == 1 else getattr(getattr(layer, "norm", None), "n_groups", None)
    if of_group <= 0 or odd or of_group % state or groups is None or (groups != 1 and groups % size):
        return None
    replicas = groups == 1 and size > 1
    each = _Section(0, of_group, of_group) if replicas else _Section(rank * of_group, of_group, size * of_group)
    return [_Section(rank * inner, inner, size * inner), each, each]


def _whole(spec: Any, rank: Rank, size: int, device: str) -> Piece:
    states = zip(spec.shapes, spec.dtypes, strict=True)
    parts = ",".join(f"{'x'.join(map(str, shape))}:{_plain(dtype)}" for shape, dtype in states)
    order = "channels first" if _channels_outside() else "rows first"
    name = getattr(spec.mamba_type, "name", spec.mamba_type)
    encoding = f"vllm/state/{name}/{parts}/{order}/{device}"
    nbytes = int(spec.state_content_size_bytes)
    if getattr(spec, "tp_replicated", False):
        return Piece("state", nbytes, f"{encoding}/on all ranks", None)
    return Piece("state", nbytes, f"{encoding}/of {size} ranks", Heads(rank.tp, 1, size, nbytes))


def _channels_outside() -> bool:
    """Return whether a convolution's state is [channels, rows] rather than [rows, channels]; an environment variable of vLLM's decides."""
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return bool(is_conv_state_dim_first())


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
