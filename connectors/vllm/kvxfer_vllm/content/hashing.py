"""Hashes of what KV depends on: of values that hold tensors, and of a checkpoint's files."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from blake3 import blake3

from kvxfer.errors import KvxferError
from kvxfer.identity import key


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


MAX_SAMPLES, SAMPLE_BYTES = 4096, 512
"""Samples of a whole checkpoint at most, and the size of each: 2 MiB of reads, whatever the model's size."""
MAX_TENSOR_SAMPLES = 256
"""Samples of one tensor, or of one file in another format, at most."""
LONGEST_HEADER = 100 << 20
"""What the format allows."""
READER_THREADS = 16
"""Threads: a network file system answers many questions in the time of one."""

OTHERS = (".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors", ".safetensors")

Place = tuple[str, int, int]
"""A file, and where in it something begins and how long it is."""


class _Tensor(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


_headers = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensors = msgspec.json.Decoder(_Tensor)


def fingerprint(checkpoint: Path) -> str:
    """16 hexadecimal digits for a folder of weights, or for one file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds no weights, or a file of it is damaged.
    """
    files = _files(checkpoint)
    if not files:
        raise ValueError(f"{checkpoint} holds no file of weights")
    with ThreadPoolExecutor(READER_THREADS) as pool:
        found: list[tuple[tuple[object, ...], tuple[str, int, int]]]
        if all(file.suffix == ".safetensors" for file in files):
            found = sorted(entry for entries in pool.map(_header, files) for entry in entries)
        else:
            found = [((file.name, file.stat().st_size), (str(file), 0, file.stat().st_size)) for file in files]
        chosen = _chosen(len(found))
        each = max(1, min(MAX_TENSOR_SAMPLES, MAX_SAMPLES // len(chosen)))
        samples = [_samples(found[i][1], each) for i in chosen]
        contents = list(pool.map(_read, [place for places in samples for place in places]))
    told = hashlib.blake2b(digest_size=8)
    for name, (_, _, length) in found:
        told.update(key(*map(str, name), length))
    told.update(key(*contents))
    return told.hexdigest()


def _files(checkpoint: Path) -> list[Path]:
    """Return the files of weights: those that an index names, if there is one, else safetensors, else others."""
    if checkpoint.is_file():
        return [checkpoint]
    named: set[str] = set()
    for index in sorted(checkpoint.glob("*.safetensors.index.json")):
        named |= set(msgspec.json.decode(index.read_bytes()).get("weight_map", {}).values())
    here = sorted(file for file in checkpoint.iterdir() if file.suffix in OTHERS)
    tensors = [file for file in here if file.suffix == ".safetensors"]
    tensors = [file for file in tensors if file.name in named] or tensors
    # A checkpoint may come in two forms, and engines of one checkpoint may load one or the other.
    return [file for file in tensors if not file.name.startswith("consolidated")] or tensors or here


def _header(file: Path) -> list[tuple[tuple[str, ...], Place]]:
    """(name, type, shape; place) of each tensor of a safetensors file."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        if not 0 < length <= min(LONGEST_HEADER, size):
            raise ValueError(f"{file} does not begin like safetensors")
        content = os.pread(descriptor, length, 8)
    finally:
        os.close(descriptor)
    # Files of one rank each hold tensors of one name; then the file is part of the name.
    sharded = "-rank-" in file.name
    try:
        out = []
        for name, raw in _headers.decode(content).items():
            if name == "__metadata__":
                continue
            tensor = _tensors.decode(raw)
            begin, end = tensor.data_offsets
            if not 0 <= begin <= end <= size - 8 - length:
                raise ValueError(f"{file}: tensor {name!r} lies outside of it")
            described = (name, tensor.dtype, str(tensor.shape), *([file.name] if sharded else []))
            out.append((described, (str(file), 8 + length + begin, end - begin)))
        return out
    except msgspec.MsgspecError as e:
        raise ValueError(f"{file} does not begin like safetensors: {e}") from None


def _chosen(n: int) -> list[int]:
    """Which of ``n`` tensors are sampled: all, or as many as may be, spread over them."""
    return list(range(n)) if n <= MAX_SAMPLES else [i * n // MAX_SAMPLES for i in range(MAX_SAMPLES)]


def _samples(place: Place, n: int) -> list[Place]:
    """``n`` places in a tensor, the first at its beginning and the last at its end; fewer if they would overlap."""
    file, at, length = place
    n = max(1, min(n, -(-length // SAMPLE_BYTES)))
    last = max(0, length - SAMPLE_BYTES)
    return [(file, at + (last * i // (n - 1) if n > 1 else 0), min(SAMPLE_BYTES, length)) for i in range(n)]


def _read(place: Place) -> bytes:
    file, at, length = place
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(descriptor, length, at)
    finally:
        os.close(descriptor)
