"""SGLang's metadata of a request: one row of each of several buffers in host memory, such as first token and log probabilities."""

from __future__ import annotations

import ctypes
from typing import Any

from kvxfer import PeerError


def row_of(args: Any, index: int) -> bytes:
    """Return a request's row of all buffers, one behind the other."""
    rows = zip(args.aux_data_ptrs, args.aux_item_lens, strict=True)
    return b"".join(ctypes.string_at(start + index * size, size) for start, size in rows)


def set_row(args: Any, index: int, row: bytes) -> None:
    """Write a request's row into all buffers.

    Raises:
        PeerError: It is of another size; nothing is written.
    """
    if len(row) != sum(args.aux_item_lens):
        raise PeerError(
            f"the prefill server has {len(row)} bytes of metadata for a request and this one {sum(args.aux_item_lens)}",
            advice="give both the same speculation, sampling masks and --disaggregation-enable-kv-checksum",
        )
    done = 0
    for start, size in zip(args.aux_data_ptrs, args.aux_item_lens, strict=True):
        ctypes.memmove(start + index * size, row[done : done + size], size)
        done += size
