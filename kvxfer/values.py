"""The facts that every part of kvxfer speaks of, one type each: block tables, groups, ranks, offers and fetches.

Values only: frozen, compared by content, hashable, good for pickle and for msgpack. They cross module, process and host
borders as they are; the wire puts its own envelope around them. Those that are made for each transfer are not the garbage collector's
(``gc=False``, here and elsewhere): they are in no cycle, and it would look at thousands of them again and again.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta
from msgspec.structs import force_setattr

from kvxfer import arguments
from kvxfer.errors import ArgumentError
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import Generation, Source, TransferId

if TYPE_CHECKING:
    from numpy.typing import NDArray  # for annotations alone it takes too long to load

__all__ = ["NULL", "BlockTable", "Failure", "FailureKind", "Fetch", "Group", "Ints", "Offer", "Outcome", "Rank"]

Ints = np.ndarray[Any, np.dtype[np.int64]]

NULL = -1
"""The id of "no block here"."""

MOST_TOKENS, MOST_DIGEST = 1 << 48, 64
"""Tokens of a transfer, and bytes of a digest."""
MOST_PAYLOAD, MOST_CONSUMERS = 64 << 10, 1 << 16
"""Bytes of a payload, and consumers of an offer."""
MOST_BANDS = 8
"""Ranges into which layers are divided. Of layers that take equally long, one band is left to be moved when the last has been
computed: an eighth of the bytes. Each costs a fence and a message for each transfer, so that more would soon cost more than
they hide."""
MOST_REASON = 1 << 20
"""Characters of a reason that an engine gives; peers are told the beginning."""

_LITTLE = np.dtype("<i4")
_ID_BYTES = 4
_NULL_BYTES = b"\xff" * _ID_BYTES
_FEW = 32
"""Ids of a row that Python has looked at before numpy begins to."""
_SHORT = [struct.Struct(f"<{n}i") for n in range(_FEW + 1)]
"""How rows of so many ids lie in memory."""
_MOST_GROUPS = 128


Kind = Literal["full", "window", "state", "local"]
"""What a group keeps; see ``Group``."""


class Rank(msgspec.Struct, frozen=True, order=True):
    """A worker's place in its engine.

    Attributes:
        pp: Pipeline stage, from 0.
        tp: tensor-parallel rank, from 0.
    """

    pp: int = 0
    tp: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "pp", arguments.integer("pp", self.pp, 0))
        force_setattr(self, "tp", arguments.integer("tp", self.tp, 0))


class Group(msgspec.Struct, frozen=True):
    """A KV-cache group: the layers that share one block table.

    Attributes:
        block_tokens: Tokens that a block of the table holds. Where kernels use smaller blocks than the scheduler, the
            group and the table are both of the scheduler's blocks, or both of the kernels'. For a ``state`` with one
            block for the whole request: the greatest length that a request can have.
        kind: ``full`` keeps every block for the life of a request. ``window`` gives up blocks that fall behind (sliding
            window, chunked local attention). ``state`` keeps a recurrent state: the block at position ``p`` holds the
            one after the last computed token of ``[p * block_tokens, (p + 1) * block_tokens)``; only that of the last
            token is taken over. ``local`` is moved by nobody and listed in no offer and no fetch; a cache that peers
            see has none.
        window: Of a ``window``, how many tokens a token attends to at most, itself included; else 0.

    Raises:
        ArgumentError: An argument is of the wrong type or range.
    """

    block_tokens: int
    kind: Kind = "full"
    window: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "block_tokens", arguments.integer("block_tokens", self.block_tokens, 1, MOST_TOKENS))
        if self.kind not in get_args(Kind):
            raise ArgumentError(f"kind must be one of {', '.join(get_args(Kind))}, not {arguments.shown(self.kind)}")
        least, most = (1, MOST_TOKENS) if self.kind == "window" else (0, 0)
        force_setattr(self, "window", arguments.integer("window", self.window, least, most))

    def blocks(self, tokens: int) -> int:
        """Return how many blocks ``tokens`` tokens take."""
        return -(-tokens // self.block_tokens)

    def moved(self, tokens: int) -> tuple[int, int]:
        """Return the positions ``[first, past)`` of the blocks that can be moved of ``tokens`` tokens."""
        if self.kind == "local" or not tokens:
            return 0, 0
        past = self.blocks(tokens)
        return past - 1 if self.kind == "state" else 0, past


class BlockTable(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """A request's blocks: for each KV-cache group the block ids by position.

    Block ``i`` of a group holds the tokens ``[i * block_tokens, (i + 1) * block_tokens)``; ``NULL`` stands where there
    is no block. ``table[g]`` is the row of a group as int64 ``[blocks]``, and iteration gives all rows so.

    Attributes:
        rows: Each group's ids as little-endian int32, one after the other.

    Raises:
        ArgumentError: A row is not of whole int32, or holds an id below -1; more than 128 rows. From a peer: ``PeerError`` at the decoder.
    """

    rows: Annotated[tuple[bytes, ...], Meta(max_length=_MOST_GROUPS)] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.rows, tuple) or len(self.rows) > _MOST_GROUPS:
            raise ArgumentError(f"rows must be a tuple of up to {_MOST_GROUPS}, not {arguments.shown(self.rows)}")
        for g, row in enumerate(self.rows):
            if not isinstance(row, bytes):
                raise ArgumentError(f"rows[{g}] must be bytes, not {arguments.shown(row)}; BlockTable.of takes numbers")
            if len(row) % _ID_BYTES:
                raise ArgumentError(f"block table, group {g}: {len(row)} bytes are not a whole number of int32")
            if _extremes(row)[0] < NULL:
                raise ArgumentError(f"block table, group {g}: it holds an id below -1")

    @classmethod
    def of(cls, rows: Iterable[Sequence[int] | NDArray[Any]], null: int = NULL) -> BlockTable:
        """Make a table from one sequence or array of integers for each group.

        Args:
            rows: The ids by position.
            null: The id by which the engine says that there is no block.

        Raises:
            ArgumentError: Ids that are not integers, or are below -1 or above 2**31 - 1.
        """
        if isinstance(rows, (str, bytes)) or not hasattr(type(rows), "__iter__"):
            raise ArgumentError(f"rows must be one row of block ids for each group, not {arguments.shown(rows)}")
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
        """Return how many positions the row of group ``g`` has."""
        return len(self.rows[g]) // _ID_BYTES

    @property
    def empty(self) -> bool:
        """Whether it holds no block at all."""
        return not b"".join(self.rows).lstrip(_NULL_BYTES)  # no other id is of such bytes alone

    def greatest(self, g: int) -> int:
        """Return the greatest id in the row of group ``g``; ``NULL`` if it holds no block."""
        row = self.rows[g]
        if len(row) > _FEW * _ID_BYTES:
            return int(np.maximum.reduce(np.frombuffer(row, _LITTLE)))
        return max(_SHORT[len(row) // _ID_BYTES].unpack(row), default=NULL)

    def there(self, g: int, first: int, past: int) -> bool:
        """Return whether a group has a block at each position ``[first, past)``."""
        row = self.rows[g][first * _ID_BYTES : past * _ID_BYTES]
        return len(row) == (past - first) * _ID_BYTES and (not row or _extremes(row)[0] != NULL)

    def keeps(self, earlier: BlockTable, g: int, first: int, past: int) -> bool:
        """Return whether the row of a group has the same at the positions ``[first, past)`` as that of an earlier table."""
        span = slice(first * _ID_BYTES, past * _ID_BYTES)
        return self.rows[g][span] == earlier.rows[g][span]

    def distinct(self, g: int, first: int, past: int) -> bool:
        """Return whether a group has a block at each position ``[first, past)``, and none at two positions before ``past``.

        The row has so many positions.
        """
        if past <= _FEW:
            few = _SHORT[past].unpack_from(self.rows[g])
            blocks = [block for block in few if block != NULL]
            return NULL not in few[first:] and len(set(blocks)) == len(blocks)
        ids = np.frombuffer(self.rows[g], _LITTLE, past)
        there = ids.copy()
        there.sort()
        if there[0] == NULL:
            if (ids[first:] == NULL).any():
                return False
            there = there[there != NULL]
        return not (there[1:] == there[:-1]).any()

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(map(len, self.rows))

    def ids(self) -> tuple[int, ...]:
        """Return the blocks of all groups, without ``NULL``."""
        every = np.frombuffer(b"".join(self.rows), _LITTLE)
        return tuple(every[every != NULL].tolist())

    def only(self, spans: Iterable[tuple[int, int]]) -> BlockTable:
        """Return the table with each row cut to the positions ``[first, past)``: ``NULL`` before, nothing behind."""
        return BlockTable(
            tuple(
                _NULL_BYTES * min(first, past) + row[first * _ID_BYTES : past * _ID_BYTES]
                for row, (first, past) in zip(self.rows, spans, strict=True)
            )
        )

    def cut(self, spans: Iterable[tuple[int, int]]) -> BlockTable:
        """Return of each row what is at the positions ``[first, past)``; ``behind`` puts it there again."""
        rows = zip(self.rows, spans, strict=True)
        return BlockTable(tuple([row[first * _ID_BYTES : past * _ID_BYTES] for row, (first, past) in rows]))

    def behind(self, firsts: Iterable[int]) -> BlockTable:
        """Return the table with each row moved behind so many positions of ``NULL``."""
        return BlockTable(tuple([_NULL_BYTES * n + row for row, n in zip(self.rows, firsts, strict=False)]))

    def filled(self, other: BlockTable) -> BlockTable:
        """Return the table with the ids of another one where it has ``NULL``; no row gets longer."""
        rows = []
        for mine, theirs in zip(self, other, strict=True):
            n = min(len(mine), len(theirs))
            mine[:n] = np.where(mine[:n] == NULL, theirs[:n], mine[:n])
            rows.append(mine)
        return BlockTable.of(rows)

    def continues(self, earlier: BlockTable) -> bool:
        """Return whether every row begins with that of an earlier table."""
        return all(row.startswith(old) for row, old in zip(self.rows, earlier.rows, strict=True))


class Offer(msgspec.Struct, frozen=True, gc=False):
    """A producer's blocks that hold the KV of one prompt, as far as it is computed.

    True once the step that it travels with has run: a worker publishes it behind a fence recorded after that step's
    forward pass (and drafting). An increment repeats the whole table known so far; within one generation ``tokens``
    only grows and a block once listed never changes.

    Attributes:
        digest: What the KV depends on (``kvxfer.identity.digest``); a fetch must name the same.
        generation: Grows with every offer that is not a continuation of the last one; never used twice by one epoch.
            All ranks of an engine number alike.
        tokens: Tokens ``[0, tokens)`` are complete in every ``full`` group, which lists exactly
            ``ceil(tokens / block_tokens)`` blocks. Smaller than the transfer only if not final. What a block that is not full
            yet holds moves at once where blocks can be cut by token, and else once it is full.
        blocks: One row for each group. ``window`` and ``state`` groups stay empty until the final offer, and list -1
            where the engine has given a block up; a reader that wants a block that is -1 here must fail the transfer.
        final: Every group is complete; nothing follows in this generation but a revocation. May come before the engine
            has finished the request, which thus may be read before the engine holds its blocks for readers.
        consumers: How many engines are to fetch it: the offer ends when so many have it or have given it up, and what becomes
            of one means nothing for the others. An offer that repeats the last one may lower it.
        payload: Up to 64 KiB for the consumers' engines, which is never interpreted: the first token, say. They get it with the
            outcome (``Ended.payload``). Once given, with the final offer of a generation at the latest, it stays for that
            generation; all ranks give the same.
        handle: The engine's own name for it, for its events and the log; the transfer's if it is empty.
        bands: The tokens behind those of the offer before are complete in the first so many bands of layers only
            (``kvxfer.geometry.bands``): made while the other layers are computed, for consumers over slow links. 0: in all layers.
            Not in a final offer, and one for all layers follows.

    Raises:
        ArgumentError: An argument is of the wrong type or range. Integers of numpy are taken as the numbers they are.
    """

    transfer: TransferId
    digest: bytes
    generation: Generation
    tokens: int
    blocks: BlockTable
    final: bool
    consumers: int = 1
    payload: bytes = b""
    handle: str = ""
    bands: int = 0

    def __post_init__(self) -> None:
        _named(self)
        arguments.string("handle", self.handle, empty=True)
        force_setattr(self, "generation", arguments.integer("generation", self.generation, 0))
        force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 0, MOST_TOKENS))
        force_setattr(self, "final", arguments.flag("final", self.final))
        force_setattr(self, "consumers", arguments.integer("consumers", self.consumers, 1, MOST_CONSUMERS))
        arguments.octets("payload", self.payload, MOST_PAYLOAD, empty=True)
        if self.final and not self.tokens:
            raise ArgumentError("tokens must be positive in a final offer, not 0")
        force_setattr(self, "bands", arguments.integer("bands", self.bands, 0, 0 if self.final else MOST_BANDS))


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """A consumer's request: bring the tokens ``[start, tokens)`` of a transfer into these blocks.

    Attributes:
        handle: The engine's own name for it, unique among its live fetches.
        digest: What the KV depends on (``kvxfer.identity.digest``); the offer must name the same.
        source: The producer's directory.
        blocks: For each group the destination by position; -1 where nothing is wanted (no block there, or it is cached).
            A block that is wanted may begin before ``start``; those tokens are the engine's own and are not overwritten.
            A ``full`` group has one at each position from that of ``start`` on, or an empty row.
        tokens: Where a group is a ``state``, the number that the producer's final offer must have: a state of more or
            fewer tokens is another state.
        own: This engine's directory, for an engine of several ranks.
        progress: A ``Progress`` event comes each time that so many more tokens are here, or more; 0: never.
        offered: The producer is known to have offered all of it. If it does not know it (any more), the fetch fails within
            about a second; else it waits for the offer until its deadline.
        enough: How many tokens are of use, should the producer give up before all are computed: the fetch is then delivered with
            those that it has offered (``Ended.short``). 0: all tokens or none. Only where all groups are ``full``.

    Raises:
        ArgumentError: An argument is of the wrong type or range. Integers of numpy are taken as the numbers they are.
    """

    handle: str
    transfer: TransferId
    digest: bytes
    source: Source
    blocks: BlockTable
    start: int
    tokens: int
    own: Source | None = None
    progress: int = 0
    offered: bool = False
    enough: int = 0

    def __post_init__(self) -> None:
        arguments.string("handle", self.handle)
        _named(self)
        arguments.instance("source", self.source, Source)
        if self.own is not None:
            arguments.instance("own", self.own, Source)
        force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 1, MOST_TOKENS))
        force_setattr(self, "start", arguments.integer("start", self.start, 0, self.tokens - 1))
        force_setattr(self, "progress", arguments.integer("progress", self.progress, 0, MOST_TOKENS))
        force_setattr(self, "offered", arguments.flag("offered", self.offered))
        force_setattr(self, "enough", arguments.integer("enough", self.enough, 0, self.tokens))


def _named(value: Offer | Fetch) -> None:
    """Refuse an offer or fetch that does not say of what."""
    arguments.instance("transfer", value.transfer, TransferId)
    arguments.octets("digest", value.digest, MOST_DIGEST)
    arguments.instance("blocks", value.blocks, BlockTable)


def _extremes(row: bytes) -> tuple[int, int]:
    """Return the least and the greatest id of a row; ``NULL`` if it is empty."""
    if not row:
        return NULL, NULL
    if len(row) > _FEW * _ID_BYTES:
        ids = np.frombuffer(row, _LITTLE)
        return int(np.minimum.reduce(ids)), int(np.maximum.reduce(ids))
    few = _SHORT[len(row) // _ID_BYTES].unpack(row)
    return min(few), max(few)


def _packed(g: int, row: Sequence[int] | NDArray[Any], null: int) -> bytes:
    """Return the ids of a row as the wire has them."""
    try:
        if not isinstance(row, np.ndarray):
            row = array("q", row)
            if 0 < len(row) <= _FEW and null == NULL <= min(row) and max(row) < 1 << 31:
                return _SHORT[len(row)].pack(*row)
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
