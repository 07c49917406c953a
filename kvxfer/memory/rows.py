"""The sum of the values of rows in host memory, the inner loop of ``checksum``.

It is compiled where numba is installed, and done by numpy elsewhere, which takes three times as long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from operator import or_
from typing import TYPE_CHECKING, Any

import numpy as np

from kvxfer.logs import logger

if TYPE_CHECKING:
    from numpy.typing import NDArray

Keys = np.ndarray[Any, np.dtype[np.uint64]]

log = logger("kvxfer.memory")

# Of ``mix``.
FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


def mix(x: Keys) -> Keys:
    """Apply splitmix64's finaliser, a bijection on 64 bits."""
    x = (x ^ (x >> SHIFTS[0])) * FACTORS[0]
    x = (x ^ (x >> SHIFTS[1])) * FACTORS[1]
    return x ^ (x >> SHIFTS[2])


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of ``unit`` bytes in a piece of memory, at even distances from each of several places."""

    memory: NDArray[np.uint8]  # uint8
    unit: int  # bytes of a row
    begins: NDArray[np.int64]  # places in ``memory``, int64, in bytes
    shape: tuple[int, ...]  # rows along each axis, up to four
    strides: tuple[int, ...]  # bytes from row to row along each axis
    keys: Keys  # key of each row, uint64 of ``shape``
    first: Keys  # what to add to the keys at each place, uint64

    @cached_property
    def aligned(self) -> bool:
        """Whether all rows consist of whole 4-byte words at addresses that are multiples of 4."""
        places = int(np.bitwise_or.reduce(self.begins + self.memory.ctypes.data))
        return not reduce(or_, self.strides, self.unit | places) % 4

    def words(self, begin: int) -> NDArray[np.uint32]:
        """Return the rows of one place as little-endian words filled up with zeros, uint32 ``[*shape, words]``."""
        if self.aligned:
            return np.ndarray((*self.shape, self.unit // 4), "<u4", self.memory, begin, (*self.strides, 4))
        words = np.empty((*self.shape, -(-self.unit // 4)), "<u4")
        if self.unit % 4:
            words[..., -1] = 0
        words.view(np.uint8)[..., : self.unit] = np.ndarray(
            (*self.shape, self.unit), np.uint8, self.memory, begin, (*self.strides, 1)
        )
        return words


def sum_rows(rows: Rows, factors: Keys, length: np.uint64) -> int:
    """Sum ``mix((sum of w[i] * factors[i] + length) ^ (key + first))`` over all rows; see ``checksum``.

    Any thread may call it; other threads run meanwhile.
    """
    return (best() if rows.aligned else by_numpy)(rows, factors, length)


@cache
def best() -> Callable[[Rows, Keys, np.uint64], int]:
    """Return the fastest way for aligned rows. The first call in a process may take seconds, to compile it."""
    if importlib.util.find_spec("numba") is not None:
        try:
            _compiled()
            return by_numba
        except Exception as e:  # it refuses versions of numpy that it does not know, for one
            log.warning("numba is installed, but does not work; checksums of host memory are slower without it: %s", e)
    return by_numpy


def by_numba(rows: Rows, factors: Keys, length: np.uint64) -> int:
    """Sum aligned rows with compiled code."""
    skip = -rows.memory.ctypes.data % 4
    memory = rows.memory[skip : skip + (len(rows.memory) - skip) // 4 * 4].view(np.uint32)
    more = 4 - len(rows.shape)
    strides = (0,) * more + tuple(s // 4 for s in rows.strides)
    begins, keys = (rows.begins - skip) // 4, rows.keys[(None,) * more]
    return int(_compiled()(memory, begins, strides, factors, length, keys, rows.first))


@cache
def _compiled() -> Any:
    from numba import njit, types

    def view(kind: Any, axes: int, layout: str) -> Any:
        return types.Array(kind, axes, layout, readonly=True)

    key, mixed = types.uint64, njit(types.uint64(types.uint64), nogil=True)(mix)

    @njit(  # type: ignore[untyped-decorator]
        key(
            view(types.uint32, 1, "C"),
            view(types.int64, 1, "A"),
            types.UniTuple(types.int64, 4),
            view(key, 1, "C"),
            key,
            view(key, 4, "A"),
            view(key, 1, "A"),
        ),
        nogil=True,
    )
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
                                digest += np.uint64(row[i]) * factors[i]
                            total += mixed(digest ^ (keys[a, b, c, d] + first[n]))
        return total

    return add


def by_numpy(rows: Rows, factors: Keys, length: np.uint64) -> int:
    """Sum rows of any alignment with numpy."""
    total = 0
    for begin, first in zip(rows.begins.tolist(), rows.first, strict=True):
        digests = np.einsum("...i,i->...", rows.words(begin), factors, dtype=np.uint64, casting="safe")
        total += int(mix((digests + length) ^ (rows.keys + first)).sum())
    return total
