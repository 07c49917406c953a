"""The facts that every part of kvxfer speaks of, one type each: block tables, groups, ranks, offers and fetches.

Values only: frozen, compared by content, hashable, good for pickle and for msgpack. They cross module, process and host
borders as they are; the wire puts its own envelope around them. Those that are made for each transfer are not the garbage collector's
(``gc=False``, here and elsewhere): they are in no cycle, and it would look at thousands of them again and again.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec.structs import force_setattr

from kvxfer import arguments
from kvxfer.block_table import NULL, BlockTable, Ints
from kvxfer.errors import ArgumentError
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import Generation, Source, TransferId

__all__ = ["NULL", "BlockTable", "Failure", "FailureKind", "Fetch", "Group", "Ints", "Offer", "Outcome", "Rank"]

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
