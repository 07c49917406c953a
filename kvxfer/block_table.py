"""Block tables: which blocks of each KV-cache group hold a request's tokens, in the form in which they are sent."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from kvxfer import arguments
from kvxfer.errors import ArgumentError

if TYPE_CHECKING:
    from numpy.typing import NDArray  # for annotations alone it takes too long to load

__all__ = ["NULL", "BlockTable", "Ints"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

NULL = -1
"""The id of "no block here"."""

_LITTLE = np.dtype("<i4")
_ID_BYTES = 4
_NULL_BYTES = b"\xff" * _ID_BYTES
_FEW = 128
"""Rows of up to this many ids are handled by Python alone. numpy would be faster from 64 on, but not after a pause, with cold caches."""
_SHORT = [struct.Struct(f"<{n}i") for n in range(_FEW + 1)]
"""For each number of ids, the layout of such a row in memory."""
_MAX_GROUPS = 128


class BlockTable(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The blocks of one request: a row of block ids for each KV-cache group.

    The block at position ``i`` of a row holds the tokens ``[i * block_tokens, (i + 1) * block_tokens)``; ``NULL`` (-1) means
    that there is none. ``table[g]`` is the row of group ``g`` as int64 ``[blocks]``, and iteration yields all rows like that.

    Attributes:
        rows: Each group's ids as little-endian int32, one after the other.

    Raises:
        ArgumentError: A row is not a whole number of int32 or holds an id below -1, or there are more than 128 rows. In a
            peer's message the decoder turns this into a ``PeerError``.
    """

    rows: Annotated[tuple[bytes, ...], Meta(max_length=_MAX_GROUPS)] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple) or len(self.rows) > _MAX_GROUPS:
            raise ArgumentError(f"rows must be a tuple of up to {_MAX_GROUPS}, not {arguments.describe(self.rows)}")
        for g, row in enumerate(self.rows):
            if not isinstance(row, bytes):
                raise ArgumentError(
                    f"rows[{g}] must be bytes, not {arguments.describe(row)}; BlockTable.of takes numbers"
                )
            if len(row) % _ID_BYTES:
                raise ArgumentError(f"block table, group {g}: {len(row)} bytes are not a whole number of int32")
            if _least(row) < NULL:
                raise ArgumentError(f"block table, group {g}: it holds an id below -1")

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | NDArray[Any]], null: int = NULL) -> BlockTable:
        """Make a table from one sequence or array of integers for each group.

        Args:
            rows: The ids by position.
            null: The id that the engine uses for "no block here".

        Raises:
            ArgumentError: An id is not an integer, or is below -1 or above 2**31 - 1.
        """
        if isinstance(rows, (str, bytes)) or not hasattr(type(rows), "__iter__"):
            raise ArgumentError(f"rows must be one row of block ids for each group, not {arguments.describe(rows)}")
        null = arguments.integer("null", null)
        return cls(tuple([_packed(g, row, null) for g, row in enumerate(rows)]))

    def __getitem__(self, g: int) -> Ints:
        return np.frombuffer(self.rows[g], _LITTLE).astype(np.int64)

    def __iter__(self) -> Iterator[Ints]:
        return (self[g] for g in range(len(self.rows)))

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self.rows)

    def __repr__(self) -> str:
        return f"BlockTable.of({self.tolist()})"

    def tolist(self) -> list[list[int]]:
        """Return the ids as lists of int."""
        return [row.tolist() for row in self]

    def count(self, g: int) -> int:
        """Return the number of positions in the row of group ``g``."""
        return len(self.rows[g]) // _ID_BYTES

    @property
    def empty(self) -> bool:
        """Whether it holds no block at all."""
        return not b"".join(self.rows).lstrip(_NULL_BYTES)  # the bytes of any other id include one that is not 0xff

    def greatest(self, g: int) -> int:
        """Return the greatest id in the row of group ``g``; ``NULL`` if it holds no block."""
        row = self.rows[g]
        if len(row) > _FEW * _ID_BYTES:
            return int(np.maximum.reduce(np.frombuffer(row, _LITTLE)))
        return max(_SHORT[len(row) // _ID_BYTES].unpack(row), default=NULL)

    def there(self, g: int, first: int, past: int) -> bool:
        """Return whether group ``g`` has a block at each of the positions ``[first, past)``."""
        row = self.rows[g][first * _ID_BYTES : past * _ID_BYTES]
        return len(row) == (past - first) * _ID_BYTES and (not row or _least(row) != NULL)

    def keeps(self, earlier: BlockTable, g: int, first: int, past: int) -> bool:
        """Return whether an earlier table has the same ids for group ``g`` at the positions ``[first, past)``."""
        span = slice(first * _ID_BYTES, past * _ID_BYTES)
        return self.rows[g][span] == earlier.rows[g][span]

    def distinct(self, g: int, first: int, past: int) -> bool:
        """Return whether group ``g`` has a block at each of the positions ``[first, past)``, and no block twice before ``past``.

        The row must have at least ``past`` positions.
        """
        if past <= _FEW:
            few = _SHORT[past].unpack_from(self.rows[g])
            blocks = set(few)
            if NULL not in blocks:
                return len(blocks) == past
            return NULL not in few[first:] and len(blocks) - 1 == past - few.count(NULL)
        ids = np.frombuffer(self.rows[g], _LITTLE, past)
        there = ids.copy()
        there.sort()
        if there[0] == NULL:
            if (ids[first:] == NULL).any():
                return False
            there = there[there != NULL]
        return not (there[1:] == there[:-1]).any()

    def blocks(self, g: int, first: int, past: int) -> set[int]:
        """Return the blocks that group ``g`` has at the positions ``[first, past)``, as far as the row goes."""
        row = self.rows[g][first * _ID_BYTES : past * _ID_BYTES]
        few = len(row) <= _FEW * _ID_BYTES
        ids = set(_SHORT[len(row) // _ID_BYTES].unpack(row) if few else np.frombuffer(row, _LITTLE).tolist())
        ids.discard(NULL)
        return ids

    @property
    def nbytes(self) -> int:
        """The size of all rows in bytes."""
        return sum(map(len, self.rows))

    def ids(self) -> tuple[int, ...]:
        """Return the block ids of all groups, without ``NULL``."""
        every = np.frombuffer(b"".join(self.rows), _LITTLE)
        return tuple(every[every != NULL].tolist())

    def only(self, spans: Iterable[tuple[int, int]]) -> BlockTable:
        """Return the table with each row limited to its positions ``[first, past)``: ``NULL`` before, nothing after."""
        return BlockTable(
            tuple(
                _NULL_BYTES * min(first, past) + row[first * _ID_BYTES : past * _ID_BYTES]
                for row, (first, past) in zip(self.rows, spans, strict=True)
            )
        )

    def cut(self, spans: Iterable[tuple[int, int]]) -> BlockTable:
        """Return a table of only the positions ``[first, past)`` of each row; ``behind`` undoes the shift."""
        rows = zip(self.rows, spans, strict=True)
        return BlockTable(tuple([row[first * _ID_BYTES : past * _ID_BYTES] for row, (first, past) in rows]))

    def behind(self, firsts: Iterable[int]) -> BlockTable:
        """Return the table with as many positions of ``NULL`` put before each row as ``firsts`` says."""
        return BlockTable(tuple([_NULL_BYTES * n + row for row, n in zip(self.rows, firsts, strict=False)]))

    def filled(self, other: BlockTable) -> BlockTable:
        """Return the table with each ``NULL`` replaced by the id of another table; no row gets longer."""
        rows = []
        for mine, theirs in zip(self, other, strict=True):
            n = min(len(mine), len(theirs))
            mine[:n] = np.where(mine[:n] == NULL, theirs[:n], mine[:n])
            rows.append(mine)
        return BlockTable.of(rows)

    def continues(self, earlier: BlockTable) -> bool:
        """Return whether every row begins with the same row of an earlier table."""
        return all(row.startswith(old) for row, old in zip(self.rows, earlier.rows, strict=True))


def _least(row: bytes) -> int:
    """Return the least id of a row; ``NULL`` if it is empty."""
    if len(row) > _FEW * _ID_BYTES:
        return int(np.minimum.reduce(np.frombuffer(row, _LITTLE)))
    return min(_SHORT[len(row) // _ID_BYTES].unpack(row), default=NULL)


def _packed(g: int, row: Sequence[int] | NDArray[Any], null: int) -> bytes:
    """Return the ids of a row as bytes, in the form in which they are sent."""
    if type(row) in (list, tuple, range) and (null == NULL or null not in row):
        try:
            return struct.pack(f"<{len(row)}i", *row)
        except struct.error:
            pass  # not integers, or too great: found below
    try:
        if not isinstance(row, np.ndarray):
            if type(row) is not list and isinstance(row, (bytes, bytearray, Set, Mapping)):
                # ``array`` takes bytes for machine words.
                raise TypeError(f"{arguments.describe(row)} has no ids in an order")
            row = array("q", row)
        ids = np.asarray(row) if isinstance(row, np.ndarray) else np.frombuffer(row, np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"an array of {ids.dtype} and shape {ids.shape}")
        if ids.size and int(ids.max()) >= 1 << 31:
            raise OverflowError(f"{int(ids.max())} is above 2**31 - 1")
        if ids.size and int(ids.min()) < min(NULL, null):
            raise OverflowError(f"{int(ids.min())} is below -1")
    except (TypeError, OverflowError) as error:
        raise ArgumentError(f"block table, group {g}: block ids are a row of integers of 32 bits: {error}") from error
    out = ids.astype(_LITTLE)
    if null != NULL:
        out[out == null] = NULL
    return out.tobytes()
