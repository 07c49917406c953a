"""Describe a cache from the tensors that hold it, of any library: their addresses, shapes and strides.

A tensor is read by the first of these that it has: the methods of torch, the array interfaces of numpy and CUDA, DLPack.
No library is imported, and nothing is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.geometry.cache import Cache, Heads, View
from kvxfer.geometry.region import HOST, Region, flat_starts
from kvxfer.geometry.turns import TokenTurns
from kvxfer.values import Group, Rank

__all__ = ["cache_of", "region_of"]

AXES = ("layer", "block", "head", "token", "unit")
_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_DEVICES = {1: HOST, 3: HOST, 2: "cuda", 10: "cuda", 13: "cuda", 14: "xpu"}
"""DLPack's device types that have addresses, by the names that torch has for them: it calls ROCm's GPUs ``cuda``."""


@dataclass(frozen=True)
class _Tensor:
    """What is known of a tensor; strides in bytes."""

    owner: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    dtype: str
    device: str

    @property
    def nbytes(self) -> int:
        """Bytes from its first element to the end of its last."""
        return sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)) + self.item


@dataclass(frozen=True)
class _Layer:
    """One layer of a plane, whose block 0 begins at ``address``."""

    name: str
    tensor: _Tensor
    address: int


def cache_of(
    tensors: Any,
    dims: str | Mapping[str, str],
    *,
    encoding: str | None,
    group: Group | None,
    layers: Iterable[str] | None,
    heads: tuple[int, int] | None,
    rank: Rank,
    optional: bool,
    turns: TokenTurns | None,
) -> Cache:
    """Implement ``Cache.of_tensors``.

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
    read: dict[str, tuple[list[_Tensor], list[str]]] = {}
    for plane, held in planes.items():
        arguments.string("plane", plane)
        if isinstance(dims, Mapping) and plane not in dims:
            raise ArgumentError(f"dims must name the axes of plane {plane!r} as well, or be one text for all planes")
        axes = _axes(dims[plane] if isinstance(dims, Mapping) else dims)
        if heads is not None and "head" not in axes:
            raise ArgumentError(f"heads must be left out, because the axes of plane {plane!r} have no 'head'")
        found = [_read(t, f"tensors[{plane!r}]") for t in _each(held)]
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
    cache = Cache(regions, (group,), tuple(views), rank)
    cache.check()
    return cache


def region_of(tensor: Any) -> Region:
    """Implement ``Region.of``."""
    found = _read(tensor, "tensor")
    return Region(found.address, found.nbytes, found.device).kept_by(found.owner)


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


def _shape(plane: str, t: _Tensor, axes: list[str]) -> tuple[int, int, int, tuple[int, int] | None, int | None]:
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


def _layers(plane: str, found: list[_Tensor], axes: list[str], names: tuple[str, ...] | None) -> list[_Layer]:
    """Return the layers of a plane: one for each tensor, or as many as its axis ``layer`` has."""
    places = []
    for t in found:
        n, step = (t.shape[axes.index("layer")], t.strides[axes.index("layer")]) if "layer" in axes else (1, 0)
        places += [(t, t.address + i * step) for i in range(n)]
    chosen = tuple(map(str, range(len(places)))) if names is None else names
    if len(chosen) != len(places):
        raise ArgumentError(f"layers must name each of the {len(places)} layers of plane {plane!r}, not {len(chosen)}")
    return [_Layer(name, t, address) for name, (t, address) in zip(chosen, places, strict=True)]


def _regions(found: list[_Tensor]) -> tuple[tuple[Region, ...], dict[int, int]]:
    """Return regions that hold these tensors (one for all that overlap), and the flat offset of each tensor by its id."""
    spans: list[list[_Tensor]] = []
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


def _read(tensor: Any, what: str) -> _Tensor:
    """Return what is known of a tensor.

    Raises:
        ArgumentError: It is not a tensor, is empty or read-only, or has a stride that is not positive.
    """
    found = _torch(tensor, what) or _array(tensor, what) or _dlpack(tensor, what)
    if found is None:
        raise ArgumentError(
            f"{what} must be a tensor (of torch, or with __array_interface__, __cuda_array_interface__ or __dlpack__), not "
            f"{arguments.describe(tensor)}"
        )
    if not prod(found.shape) or any(n > 1 and s <= 0 for n, s in zip(found.shape, found.strides, strict=True)):
        raise ArgumentError(
            f"{what} must not be empty or have overlapping elements: shape {found.shape}, strides {found.strides}"
        )
    return found


def _torch(tensor: Any, what: str) -> _Tensor | None:
    if not all(hasattr(tensor, name) for name in ("data_ptr", "element_size", "stride", "shape", "device", "dtype")):
        return None
    item, device = int(tensor.element_size()), tensor.device
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided" or (prod(tensor.shape) and not tensor.data_ptr()):  # sparse, or on "meta"
        raise ArgumentError(f"{what} must have memory of its elements, not be {layout} on {device}")
    where = HOST if device.type == HOST else f"{device.type}:{device.index or 0}"
    strides = tuple(int(s) * item for s in tensor.stride())
    name = str(tensor.dtype).rpartition(".")[2]
    return _Tensor(tensor, int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, item, name, where)


def _array(tensor: Any, what: str) -> _Tensor | None:
    on_cuda = getattr(tensor, "__cuda_array_interface__", None)
    interface = on_cuda or getattr(tensor, "__array_interface__", None)
    if interface is None:
        return None
    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
    if dtype.hasobject:
        raise ArgumentError(f"{what} must hold numbers, not objects of Python")
    address, read_only = interface["data"]
    if read_only:
        raise ArgumentError(f"{what} must be writable")
    device = HOST
    if on_cuda is not None:
        if not hasattr(tensor, "__dlpack_device__"):
            raise ArgumentError(f"{what} must say on which device it lies, by __dlpack_device__")
        device = f"cuda:{tensor.__dlpack_device__()[1]}"
    given = interface.get("strides")
    packed = tuple(accumulate((dtype.itemsize, *shape[:0:-1]), lambda a, b: a * b))[::-1]
    strides = packed[len(packed) - len(shape) :] if given is None else tuple(map(int, given))
    # The interface has no word for bfloat16, say, and the name none for byte order.
    kind = str(getattr(tensor, "dtype", dtype))
    return _Tensor(tensor, int(address), shape, strides, dtype.itemsize, kind, device)


class _DLTensor(ctypes.Structure):
    """The struct at the start of a DLPack capsule."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def _dlpack(tensor: Any, what: str) -> _Tensor | None:
    if not hasattr(tensor, "__dlpack__"):
        return None
    capsule = tensor.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    t = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    kind = _DLPACK_DEVICES.get(t.device_type)
    if kind is None or t.bits % 8:
        known = ", ".join(dict.fromkeys(_DLPACK_DEVICES.values()))
        raise ArgumentError(
            f"{what} must be of whole bytes, in memory of {known}; DLPack calls its device type {t.device_type}"
        )
    item, shape = t.bits * t.lanes // 8, tuple(t.shape[i] for i in range(t.ndim))
    if t.strides:
        strides = tuple(t.strides[i] * item for i in range(t.ndim))
    else:
        strides = tuple(item * prod(shape[i + 1 :]) for i in range(t.ndim))
    name = f"{_DLPACK_KINDS.get(t.code, f'code{t.code}_')}{t.bits}"
    device = kind if kind == HOST else f"{kind}:{t.device_id}"
    return _Tensor((tensor, capsule), (t.data or 0) + t.byte_offset, shape, strides, item, name, device)
