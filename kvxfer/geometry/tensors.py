"""Describe a cache from the tensors that hold it: the regions in which they lie, and views with the axes that they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry.region import Region, flat_starts
from kvxfer.geometry.tensor import Tensor, read_tensor
from kvxfer.geometry.turns import TokenTurns
from kvxfer.geometry.view import Heads, View
from kvxfer.values import Group

AXES = ("layer", "block", "head", "token", "unit")


@dataclass(frozen=True)
class _Layer:
    """One layer of a plane, whose block 0 begins at ``address``."""

    name: str
    tensor: Tensor
    address: int


def parts_of(
    tensors: Any,
    dims: str | Mapping[str, str],
    encoding: str | None,
    group: Group | None,
    layers: Iterable[str] | None,
    heads: tuple[int, int] | None,
    optional: bool,
    turns: TokenTurns | None,
) -> tuple[tuple[Region, ...], Group, tuple[View, ...]]:
    """Return the parts of ``Cache.of_tensors``: its regions, which keep the tensors alive, its group, and the views.

    Raises:
        ArgumentError: There are no tensors, or they do not have these dimensions.
    """
    planes = tensors if isinstance(tensors, Mapping) else {"kv": tensors}
    if not planes:
        raise ArgumentError("tensors must be at least one")
    names = None if layers is None else arguments.sequence_of("layers", layers, str)
    if names is not None and len(set(names)) < len(names):
        raise ArgumentError(f"layers must be named apart, not {', '.join(map(repr, names))}")
    if group is not None:
        arguments.instance("group", group, Group)
    if turns is not None:
        arguments.instance("turns", turns, TokenTurns)
    if heads is not None and not isinstance(heads, tuple):
        raise ArgumentError(f"heads must be (first head, heads of the model), not {arguments.describe(heads)}")
    read: dict[str, tuple[list[Tensor], list[str]]] = {}
    for plane, held in planes.items():
        arguments.string("plane", plane)
        if isinstance(dims, Mapping) and plane not in dims:
            raise ArgumentError(f"dims must name the axes of plane {plane!r} as well, or be one text for all planes")
        axes = _axes(dims[plane] if isinstance(dims, Mapping) else dims)
        if heads is not None and "head" not in axes:
            raise ArgumentError(f"heads must be left out, because the axes of plane {plane!r} have no 'head'")
        found = [read_tensor(t, f"tensors[{plane!r}]") for t in _each(held)]
        if not found:
            raise ArgumentError("tensors must be at least one for each plane")
        short = next((t for t in found if len(t.shape) != len(axes)), None)
        if short is not None:
            raise ArgumentError(
                f"dims must name each of the {len(short.shape)} axes of plane {plane!r}, not {len(axes)}"
            )
        read[plane] = found, axes
    regions, places = _regions([t for found, _ in read.values() for t in found])
    views: list[View] = []
    for plane, (found, axes) in read.items():
        rows = _layers(plane, found, axes, names)
        ranks = 1 if turns is None else turns.count
        block_tokens = {t.shape[axes.index("token")] * ranks for t in found if "token" in axes}
        if group is None:
            if len(block_tokens) != 1:
                raise ArgumentError(f"group must be given: plane {plane!r} does not show how many tokens a block has")
            group = Group(block_tokens.pop())
        elif block_tokens - {group.block_tokens}:
            raise ArgumentError(
                f"group must have blocks of as many tokens as plane {plane!r}: {group.block_tokens} are not {block_tokens}"
            )
        kinds = sorted({tensor.dtype for tensor in found})
        if encoding is None and len(kinds) > 1:
            raise ArgumentError(
                f"encoding must be given: the tensors of plane {plane!r} are of {' and of '.join(kinds)}"
            )
        kind = encoding if encoding is not None else kinds[0]
        views += _views(plane, rows, axes, places, kind, heads, optional, turns)
    assert group is not None
    return regions, group, tuple(views)


def _views(
    plane: str,
    rows: list[_Layer],
    axes: list[str],
    places: Mapping[int, int],
    encoding: str,
    heads: tuple[int, int] | None,
    optional: bool,
    turns: TokenTurns | None,
) -> list[View]:
    """Return one view for each combination of shape and strides among the layers of a plane."""
    alike: dict[tuple[Any, ...], list[_Layer]] = {}
    for row in rows:
        alike.setdefault(_shape(plane, row.tensor, axes), []).append(row)
    return [
        View(
            plane=plane,
            group=0,
            layers=tuple(row.name for row in of),
            offsets=tuple(places[id(row.tensor)] + row.address - row.tensor.address for row in of),
            blocks=blocks,
            block_stride=block_stride,
            unit=unit,
            encoding=encoding,
            heads=None if head is None else _heads(heads, *head),
            token_stride=token_stride,
            optional=optional,
            turns=turns,
        )
        for (blocks, block_stride, unit, head, token_stride), of in alike.items()
    ]


def _shape(plane: str, t: Tensor, axes: list[str]) -> tuple[int, int, int, tuple[int, int] | None, int | None]:
    """Return blocks, block stride, unit, (heads, head stride) and token stride; the stride of an axis of length 1 is made up."""
    at = {axis: (t.shape[i], t.strides[i]) for i, axis in enumerate(axes) if axis != "unit"}
    unit = t.item
    for i in reversed([i for i, axis in enumerate(axes) if axis == "unit"]):
        if t.shape[i] > 1 and t.strides[i] != unit:
            raise ArgumentError(
                f"dims must name as 'unit' only what lies together in memory, and axis {i} of plane {plane!r} goes by "
                f"{t.strides[i]} bytes, not {unit}"
            )
        unit *= t.shape[i]

    def stride(axis: str, alone: int) -> int:
        n, found = at[axis]
        return found if n > 1 else alone

    head = (at["head"][0], stride("head", unit)) if "head" in at else None
    token = stride("token", unit) if "token" in at else None
    within = (head[0] - 1) * head[1] if head else 0
    within += (at["token"][0] - 1) * token if token else 0
    return at["block"][0], stride("block", within + unit), unit, head, token


def _heads(where: tuple[int, int] | None, count: int, stride: int) -> Heads:
    if where is None:
        return Heads(0, count, count, stride)
    if len(where) != 2:
        raise ArgumentError(f"heads must be (first head, heads of the model), not {len(where)} numbers")
    total = arguments.integer("heads[1]", where[1], count)
    return Heads(arguments.integer("heads[0]", where[0], 0, total - count), count, total, stride)


def _layers(plane: str, found: list[Tensor], axes: list[str], names: tuple[str, ...] | None) -> list[_Layer]:
    """Return the layers of a plane: one for each tensor, or as many as its axis ``layer`` has."""
    places = []
    for t in found:
        n, step = (t.shape[axes.index("layer")], t.strides[axes.index("layer")]) if "layer" in axes else (1, 0)
        places += [(t, t.address + i * step) for i in range(n)]
    chosen = tuple(map(str, range(len(places)))) if names is None else names
    if len(chosen) != len(places):
        raise ArgumentError(f"layers must name each of the {len(places)} layers of plane {plane!r}, not {len(chosen)}")
    return [_Layer(name, t, address) for name, (t, address) in zip(chosen, places, strict=True)]


def _regions(found: list[Tensor]) -> tuple[tuple[Region, ...], dict[int, int]]:
    """Return regions that hold these tensors (one for all that overlap), and the flat offset of each tensor by its id."""
    spans: list[list[Tensor]] = []
    ends: list[int] = []
    for t in sorted(found, key=lambda t: (t.device, t.address)):
        if spans and spans[-1][0].device == t.device and t.address < ends[-1]:
            spans[-1].append(t)
            ends[-1] = max(ends[-1], t.address + t.nbytes)
        else:
            spans.append([t])
            ends.append(t.address + t.nbytes)
    regions = tuple(
        Region(of[0].address, end - of[0].address, of[0].device).kept_by(tuple(t.owner for t in of))
        for of, end in zip(spans, ends, strict=True)
    )
    starts = flat_starts(regions)
    return regions, {
        id(t): start + t.address - of[0].address for of, start in zip(spans, starts, strict=True) for t in of
    }


def _axes(dims: Any) -> list[str]:
    axes = arguments.string("dims", dims).split()
    wrong = next((axis for axis in axes if axis not in AXES), None)
    if wrong is not None:
        raise ArgumentError(f"dims must be words of {', '.join(AXES)}, not {wrong!r}")
    twice = next((axis for axis in AXES[:-1] if axes.count(axis) > 1), None)
    if twice is not None or "block" not in axes:
        raise ArgumentError(f"dims must have {twice or 'block'!r} once, not {dims!r}")
    return axes


def _each(held: Any) -> Sequence[Any]:
    return held if isinstance(held, list | tuple) else [held]
