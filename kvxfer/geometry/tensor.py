"""Read a tensor of any library: its address, shape and strides.

It is read by the first of these that it has: the methods of torch, the array interfaces of numpy and CUDA, DLPack.
No library is imported, and nothing is copied.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from kvxfer import arguments
from kvxfer.errors import ArgumentError

HOST = "cpu"
"""The device of host memory: the one kind that every process has, and the only one that the core knows by name."""

_DLPACK_KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex", 6: "bool"}
_DLPACK_DEVICES = {1: HOST, 3: HOST, 2: "cuda", 10: "cuda", 13: "cuda", 14: "xpu"}
"""DLPack's device types that have addresses, by the names that torch has for them: it calls ROCm's GPUs ``cuda``."""


@dataclass(frozen=True)
class Tensor:
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


def read_tensor(tensor: Any, what: str) -> Tensor:
    """Return what is known of a tensor.

    Raises:
        ArgumentError: It is not a tensor, is empty or read-only, lacks memory of its own for its elements, or has a stride that is
            not positive.
    """
    try:
        found = _torch(tensor, what) or _array(tensor, what) or _dlpack(tensor, what)
    except (RuntimeError, BufferError) as e:  # tensors without storage, or that their library does not give away
        raise ArgumentError(f"{what} must have memory of its elements: {str(e).partition(chr(10))[0]}") from e
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


def _torch(tensor: Any, what: str) -> Tensor | None:
    if not all(hasattr(tensor, name) for name in ("data_ptr", "element_size", "stride", "shape", "device", "dtype")):
        return None
    item, device = int(tensor.element_size()), tensor.device
    layout = str(getattr(tensor, "layout", "torch.strided"))
    if layout != "torch.strided" or (prod(tensor.shape) and not tensor.data_ptr()):  # sparse, or on "meta"
        raise ArgumentError(f"{what} must have memory of its elements, not be {layout} on {device}")
    if any(getattr(tensor, name, bool)() for name in ("is_conj", "is_neg")):
        raise ArgumentError(f"{what} must not be a conjugate or negative view: its memory holds other values")
    where = HOST if device.type == HOST else f"{device.type}:{device.index or 0}"
    strides = tuple(int(s) * item for s in tensor.stride())
    name = str(tensor.dtype).rpartition(".")[2]
    # It keeps the memory even if somebody assigns to ``tensor.data``.
    owner = tensor.detach() if hasattr(tensor, "detach") else tensor
    found = Tensor(owner, int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, item, name, where)
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else None
    if storage is not None and found.address + found.nbytes > storage.data_ptr() + storage.nbytes():
        raise ArgumentError(
            f"{what} must have memory of its elements: it takes {found.nbytes} bytes as {name}, and its storage has {storage.nbytes()}"
        )
    return found


def _array(tensor: Any, what: str) -> Tensor | None:
    on_cuda = getattr(tensor, "__cuda_array_interface__", None)
    interface = on_cuda or getattr(tensor, "__array_interface__", None)
    if interface is None:
        return None
    if isinstance(tensor, np.generic):  # the interface is of a copy, which is gone already
        raise ArgumentError(f"{what} must be an array, not a single number of numpy")
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
    return Tensor(tensor, int(address), shape, strides, dtype.itemsize, kind, device)


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


def _dlpack(tensor: Any, what: str) -> Tensor | None:
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
    return Tensor((tensor, capsule), (t.data or 0) + t.byte_offset, shape, strides, item, name, device)
