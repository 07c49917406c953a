"""A hash of values that hold tensors: by content, collision resistant, and as fast as the memory's bandwidth allows."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from kvxfer.errors import KvxferError

__all__ = ["content_hash", "tensors_in"]


def content_hash(*values: Any) -> str:
    """Return 32 hexadecimal digits that are equal only for equal values, types and shapes included.

    Takes tensors, arrays, numbers, text, bytes, None, and mappings (in the order of their keys), lists and tuples of these.

    Raises:
        KvxferError: A value is of another type.
    """
    told = blake3()
    _feed(told, values)
    found: str = told.hexdigest(length=16)
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for part in value for tensor in tensors_in(part)] if isinstance(value, list | tuple) else []


def _feed(told: blake3, value: Any) -> None:
    """Add a value: first its kind and how long it is, so that no two values give the same bytes."""
    match value:
        case torch.Tensor():
            flat = value.detach().cpu().contiguous().reshape(-1)
            _feed(told, (f"tensor {value.dtype}", tuple(value.shape)))
            told.update(flat.view(torch.uint8).numpy())
        case np.ndarray():
            _feed(told, torch.from_numpy(np.ascontiguousarray(value)))
        case Mapping():
            _feed(told, ("mapping", *sorted(value.items())))
        case list() | tuple():
            told.update(struct.pack("<cQ", b"s", len(value)))
            for part in value:
                _feed(told, part)
        case str():
            _bytes(told, b"t", value.encode(errors="surrogatepass"))
        case bytes():
            _bytes(told, b"b", value)
        case None | bool() | int() | float() | np.generic():
            _bytes(told, b"n", f"{type(value).__name__} {value!r}".encode())
        case _:
            raise KvxferError(f"a {type(value).__name__} cannot be compared by content")


def _bytes(told: blake3, kind: bytes, content: bytes) -> None:
    told.update(struct.pack("<cQ", kind, len(content)))
    told.update(content)
