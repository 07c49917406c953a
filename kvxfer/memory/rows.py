"""The sum of the values of rows in host memory, the inner loop of ``checksum``: compiled where numba is, by numpy elsewhere.

numpy passes over the bytes three times, which takes three times as long; it needs nothing else.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from math import prod
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "best", "by_numba", "by_numpy", "mix", "sum_rows"]

Words = NDArray[np.uint64]

log = logging.getLogger("kvxfer.memory")

_CHUNK = 1 << 16
"""Words folded at a time: what a core's own cache holds, and enough to hide the cost of the calls."""

# Of ``mix``.
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
HALF = np.uint64(32)


def mix(x: Words) -> Words:
    """splitmix64's finaliser, a bijection on 64 bits."""
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of ``unit`` bytes in a piece of memory (uint8): ``shape`` of them at even ``strides`` (up to four axes) from each
    of ``begins`` (int64; all in bytes). ``keys``: uint64 of ``shape``; ``first``: uint64, to add to them, for each of
    ``begins``."""

    memory: NDArray[np.uint8]
    unit: int
    begins: NDArray[np.int64]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    keys: Words
    first: Words

    @cached_property
    def aligned(self) -> bool:
        """Whether all rows are made of whole 64-bit words at addresses that divide by 8."""
        places = int(np.bitwise_or.reduce(self.begins + self.memory.ctypes.data))
        return not reduce(or_, self.strides, self.unit | places) % 8

    def words(self, begin: int) -> Words:
        """Those from one beginning as little-endian words filled up with zeros, uint64 ``[*shape, words]``."""
        if self.aligned:
            return np.ndarray((*self.shape, self.unit // 8), "<u8", self.memory, begin, (*self.strides, 8))
        whole = np.zeros((*self.shape, -(-self.unit // 8) * 8), np.uint8)
        whole[..., : self.unit] = np.ndarray((*self.shape, self.unit), np.uint8, self.memory, begin, (*self.strides, 1))
        return whole.view("<u8")


def sum_rows(rows: Rows, factors: Words, length: np.uint64) -> int:
    """``mix((sum of fold(w[i]) * factors[i] + length) ^ (key + first))`` of each row, added up; see ``checksum``. Any
    thread; others may run meanwhile."""
    return (best() if rows.aligned else by_numpy)(rows, factors, length)


@cache
def best() -> Callable[[Rows, Words, np.uint64], int]:
    """The way for rows that are aligned. The first call in a process may take seconds, to compile it."""
    if importlib.util.find_spec("numba") is not None:
        try:
            _compiled()
            return by_numba
        except Exception as e:  # it refuses versions of numpy that it does not know, for one
            log.warning("numba is installed, but does not work; checksums of host memory are slower without it: %s", e)
    return by_numpy


def by_numba(rows: Rows, factors: Words, length: np.uint64) -> int:
    """Of rows that are aligned."""
    skip = -rows.memory.ctypes.data % 8
    memory = rows.memory[skip : skip + (len(rows.memory) - skip) // 8 * 8].view(np.uint64)
    more = 4 - len(rows.shape)
    strides = (0,) * more + tuple(s // 8 for s in rows.strides)
    begins, keys = (rows.begins - skip) // 8, rows.keys[(None,) * more]
    return int(_compiled()(memory, begins, strides, factors, length, keys, rows.first))


@cache
def _compiled() -> Any:
    from numba import njit, types

    def view(kind: Any, axes: int, layout: str) -> Any:
        return types.Array(kind, axes, layout, readonly=True)

    word, mixed = types.uint64, njit(types.uint64(types.uint64), nogil=True)(mix)

    @njit(  # type: ignore[untyped-decorator]
        word(
            view(word, 1, "C"), view(types.int64, 1, "A"), types.UniTuple(types.int64, 4), view(word, 1, "C"), word,
            view(word, 4, "A"), view(word, 1, "A"),
        ),
        nogil=True,
    )  # fmt: skip
    def add(memory: Any, begins: Any, strides: Any, factors: Any, length: Any, keys: Any, first: Any) -> Any:
        total = np.uint64(0)
        for n in range(len(begins)):
            for a in range(keys.shape[0]):
                for b in range(keys.shape[1]):
                    for c in range(keys.shape[2]):
                        for d in range(keys.shape[3]):
                            at = begins[n] + a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]
                            row, digest = memory[at : at + len(factors)], length
                            for i in range(len(factors)):
                                digest += (row[i] ^ (row[i] >> HALF)) * factors[i]
                            total += mixed(digest ^ (keys[a, b, c, d] + first[n]))
        return total

    return add


def by_numpy(rows: Rows, factors: Words, length: np.uint64) -> int:
    words, total = len(factors), 0
    tiles = list(_tiles(rows.shape, max(1, _CHUNK // words)))
    digests = np.empty(rows.shape, np.uint64)
    scratch = np.empty(max(prod(shape) for _, shape in tiles) * words, np.uint64)
    for begin, first in zip(rows.begins.tolist(), rows.first, strict=True):
        content = rows.words(begin)
        for tile, shape in tiles:
            folded = scratch[: prod(shape) * words].reshape(*shape, words)
            np.right_shift(content[tile], HALF, out=folded)
            np.bitwise_xor(content[tile], folded, out=folded)
            digests[tile] = np.einsum("ij,j->i", folded.reshape(-1, words), factors).reshape(shape)
        total += int(mix((digests + length) ^ (rows.keys + first)).sum())
    return total


def _tiles(shape: tuple[int, ...], rows: int) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Index and shape of pieces of an array that are contiguous in it and have at most so many items."""
    each = prod(shape[1:])
    if each > rows:
        for i in range(shape[0]):
            for tile, inner in _tiles(shape[1:], rows):
                yield (slice(i, i + 1), *tile), (1, *inner)
        return
    step = rows // each
    for i in range(0, shape[0], step):
        n = min(step, shape[0] - i)
        yield (slice(i, i + n), *(slice(None),) * (len(shape) - 1)), (n, *shape[1:])
