"""The values that every part of kvxfer uses, one type each: block tables, groups, ranks, offers and fetches.

They are frozen, compared by content, hashable, and fit for pickle and msgpack, so that they pass between modules, processes
and hosts as they are. Those made for each transfer are hidden from the garbage collector (``gc=False``, here and
elsewhere): they form no cycles, and it would scan thousands of them again and again.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec
from msgspec.structs import force_setattr

from kvxfer import arguments
from kvxfer.block_table import NULL, BlockTable, Ints
from kvxfer.errors import ArgumentError
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import Generation, Handle, Source, TransferId

__all__ = [
    "NULL",
    "BlockTable",
    "Failure",
    "FailureKind",
    "Fetch",
    "Group",
    "Ints",
    "Offer",
    "OfferEnd",
    "Outcome",
    "Rank",
    "Stages",
]

MAX_TOKENS, MAX_DIGEST = 1 << 48, 64
"""The most tokens of a transfer, and bytes of a digest."""
MAX_PAYLOAD, MAX_CONSUMERS = 64 << 10, 1 << 16
"""The most bytes of a payload, and consumers of an offer."""
MAX_BANDS = 8
"""The most bands that layers are divided into (``kvxfer.geometry.bands``). If all layers take equally long, the last of eight
bands, an eighth of the bytes, is still to be moved once all are computed. Each band costs a fence and a message for each
transfer, so that more of them would soon cost more than they hide."""
MAX_REASON = 1 << 20
"""The most characters of a reason that an engine gives; peers are told only its beginning."""

Kind = Literal["full", "window", "state", "local"]
"""What a group keeps; see ``Group``."""


class Rank(msgspec.Struct, frozen=True, order=True):
    """A worker's place in its engine.

    Attributes:
        pp: Pipeline stage, from 0.
        tp: Tensor-parallel rank, from 0.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    pp: int = 0
    tp: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "pp", arguments.integer("pp", self.pp, 0))
        force_setattr(self, "tp", arguments.integer("tp", self.tp, 0))


class Group(msgspec.Struct, frozen=True):
    """A KV-cache group: the layers that share one block table.

    Attributes:
        block_tokens: Tokens in one block of the table. Where kernels use smaller blocks than the scheduler, group and
            table must both count the scheduler's blocks, or both the kernels'. For a ``state`` with one
            block for the whole request: the greatest length that a request can have.
        kind: ``full`` keeps every block for the life of a request. ``window`` gives up blocks that fall behind (sliding
            window, chunked local attention). ``state`` keeps a recurrent state: the block at position ``p`` holds the
            state after the last computed token of ``[p * block_tokens, (p + 1) * block_tokens)``; only the state after the
            last token is moved. ``local`` is never moved, appears in no offer and no fetch, and peers do not see it.
        window: For a ``window``, the most tokens that a token attends to, itself included; else 0.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    block_tokens: int
    kind: Kind = "full"
    window: int = 0

    def __post_init__(self) -> None:
        force_setattr(self, "block_tokens", arguments.integer("block_tokens", self.block_tokens, 1, MAX_TOKENS))
        if self.kind not in get_args(Kind):
            raise ArgumentError(f"kind must be one of {', '.join(get_args(Kind))}, not {arguments.describe(self.kind)}")
        least, most = (1, MAX_TOKENS) if self.kind == "window" else (0, 0)
        force_setattr(self, "window", arguments.integer("window", self.window, least, most))

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_tokens)

    def behind(self, tokens: int) -> int:
        """Return how many tokens lie behind the window of token ``tokens``, which does not attend to them; 0 without a window."""
        return max(0, tokens - self.window + 1) if self.window else 0

    def kept(self, tokens: int, left: int = 1) -> tuple[int, int]:
        """Return the positions ``[first, past)`` of the blocks that a producer of ``tokens`` tokens keeps for its consumers.

        They load all of the tokens, or all but the last ``left`` ones at the most, which they compute themselves. Of a window that is what
        each of them attends to; a consumer that loaded fewer would want an earlier one.
        """
        first, past = self.moved(tokens)
        return self.behind(max(tokens - left, 0)) // self.block_tokens if self.window else first, past

    def moved(self, tokens: int) -> tuple[int, int]:
        """Return the positions ``[first, past)`` of the blocks that may be moved for the first ``tokens`` tokens."""
        if self.kind == "local" or not tokens:
            return 0, 0
        past = self.blocks(tokens)
        return past - 1 if self.kind == "state" else 0, past


class Offer(msgspec.Struct, frozen=True, gc=False):
    """A producer's statement that some of its blocks hold the KV of a prompt, up to a certain token.

    It becomes true when the engine step that made it has run, so a worker publishes it behind a fence recorded after that
    step's forward pass (and drafting). A prompt prefilled in chunks is offered again after each of them: every offer repeats
    the whole table known so far; within one generation ``tokens`` only grows, and a block once listed never changes.

    Attributes:
        transfer: The name of the transfer.
        digest: What the KV depends on (``kvxfer.identity.digest``); a fetch must name the same.
        generation: Grows with every offer that does not continue the one before; never used twice in one epoch.
            All ranks of an engine use the same numbers.
        tokens: The tokens ``[0, tokens)`` are complete in every ``full`` group, which lists exactly
            ``ceil(tokens / block_tokens)`` blocks. Only the final offer has all tokens of the transfer. A last block that is
            only partly filled moves at once if blocks can be cut between tokens, else once it is full.
        blocks: One row for each group. Rows of ``window`` and ``state`` groups stay empty until the final offer, and have -1
            where the engine has given a block up; a reader that wants such a block must fail the transfer.
        final: Every group is complete, and only a revocation can follow in this generation. May come before the engine
            has finished the request, so that consumers may read before the engine keeps the blocks for them.
        consumers: How many engines are to fetch it. The offer ends when this many have it or have given it up; one that fails
            does not affect the others. An offer that repeats the one before may lower it.
        payload: Up to 64 KiB for the consumers' engines, never interpreted: the first token, say. They get it with the
            outcome (``Ended.payload``). It is given by the final offer of a generation at the latest, does not change
            within the generation, and is the same on all ranks.
        handle: The engine's own name for the offer, in its events and the log; if empty, the transfer's name.
        bands: If not 0, the tokens since the offer before are complete only in the first ``bands`` bands of layers
            (``kvxfer.geometry.bands``), while the other layers are still computed: this helps consumers over slow links.
            An offer for all layers (0) must follow; a final offer is always one.

    Raises:
        ArgumentError: An argument has the wrong type or range. Numpy's integers are accepted.
    """

    transfer: TransferId
    digest: bytes
    generation: Generation
    tokens: int
    blocks: BlockTable
    final: bool
    consumers: int = 1
    payload: bytes = b""
    handle: Handle = Handle("")
    bands: int = 0

    def __post_init__(self) -> None:
        _named(self)
        arguments.string("handle", self.handle, empty=True)
        force_setattr(self, "generation", arguments.integer("generation", self.generation, 0))
        force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 0, MAX_TOKENS))
        force_setattr(self, "final", arguments.flag("final", self.final))
        force_setattr(self, "consumers", arguments.integer("consumers", self.consumers, 1, MAX_CONSUMERS))
        arguments.bytes_of("payload", self.payload, MAX_PAYLOAD, empty=True)
        if self.final and not self.tokens:
            raise ArgumentError("tokens must be positive in a final offer, not 0")
        force_setattr(self, "bands", arguments.integer("bands", self.bands, 0, 0 if self.final else MAX_BANDS))


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """A consumer's request to bring the tokens ``[start, tokens)`` of a transfer into its blocks.

    Attributes:
        handle: The engine's own name for the fetch, unique among its live fetches.
        transfer: The name of the transfer.
        digest: What the KV depends on (``kvxfer.identity.digest``); the offer must name the same.
        source: The producer's directory.
        blocks: For each group the destination blocks by position; -1 where nothing is wanted (no block, or it is cached).
            The first block may begin before ``start``; the tokens in it before ``start`` are not overwritten.
            A ``full`` group has a block at each position from ``start``'s on, or an empty row.
        start: The first token to be moved.
        tokens: One past the last token to be moved. If a group is a ``state``, the producer's final offer must have just as
            many tokens, because the state after more or fewer is another one.
        own: This engine's directory, if the engine has several ranks.
        offered: The producer is known to have offered all of the transfer. If it does not know the transfer (any more), the
            fetch then fails within about a second, instead of waiting for the offer until its deadline.
        enough: The fewest tokens that are of use if the producer gives up before all are computed: the fetch is then delivered
            with those that were offered (``Ended.short``). 0: all tokens or none. Only where all groups are ``full``.
        patience: Seconds within which its first part must come. 0: ``Config.start_timeout``.
        tail: Whether the block that holds the last token may be written to its end: nobody has it but this request, and whatever reads
            behind that token writes there first. Then the block may move as one run, where a part of it would be many.
        number: Which fetch of its engine it is, by which that knows its end. None: the handle alone tells it apart.
        lent: Whether its blocks are lent, to be copied to those of a request once it is delivered.

    Raises:
        ArgumentError: An argument has the wrong type or range. Numpy's integers are accepted.
    """

    handle: Handle
    transfer: TransferId
    digest: bytes
    source: Source
    blocks: BlockTable
    start: int
    tokens: int
    own: Source | None = None
    offered: bool = False
    enough: int = 0
    patience: float = 0.0
    tail: bool = False
    number: int | None = None
    lent: bool = False

    def __post_init__(self) -> None:
        arguments.string("handle", self.handle)
        _named(self)
        arguments.instance("source", self.source, Source)
        if self.own is not None:
            arguments.instance("own", self.own, Source)
        force_setattr(self, "tokens", arguments.integer("tokens", self.tokens, 1, MAX_TOKENS))
        force_setattr(self, "start", arguments.integer("start", self.start, 0, self.tokens - 1))
        force_setattr(self, "offered", arguments.flag("offered", self.offered))
        force_setattr(self, "enough", arguments.integer("enough", self.enough, 0, self.tokens))
        force_setattr(self, "patience", arguments.seconds("patience", self.patience))
        force_setattr(self, "tail", arguments.flag("tail", self.tail))


def _named(value: Offer | Fetch) -> None:
    """Check the arguments that name a transfer and its blocks.

    Raises:
        ArgumentError: One has the wrong type or range.
    """
    arguments.instance("transfer", value.transfer, TransferId)
    arguments.bytes_of("digest", value.digest, MAX_DIGEST)
    arguments.instance("blocks", value.blocks, BlockTable)


class OfferEnd(msgspec.Struct, frozen=True, gc=False):
    """How an offer has ended on one rank."""

    failure: Failure | None  # why nobody has it, or not all for whom it was; ``None`` if they have
    nbytes: int  # the bytes that consumers have confirmed
    at: float  # when, by ``time.monotonic``


class Stages(msgspec.Struct, frozen=True, gc=False):
    """When a fetch reached its stages on one rank, by ``time.monotonic``, which all processes of a host share; 0: never."""

    began: float = 0.0  # the engine asked for it
    asked: float = 0.0  # the last of the producer ranks was asked, over a link that was up
    announced: float = 0.0  # the first of them had announced the first part
    heard: float = 0.0  # the last part had been announced
    arrived: float = 0.0  # the last bytes were here
    ended: float = 0.0  # it had its outcome
    # not a time, but the seconds in which announced parts were on their way or being checked. Waits between the parts
    # of a producer that sends as it computes do not count
    moving: float = 0.0
    # when bytes had last come, as far as is known: of a part that takes long, that is looked at twice a second
    last: float = 0.0
    came: int = 0  # the bytes that had come
    announced_bytes: int = 0  # the bytes that had been announced

    @property
    def unasked(self) -> bool:
        """Whether it began, but no producer rank was ever asked, so that none counts this agent as a reader."""
        return bool(self.began) and not self.asked

    def slowest(self, other: Stages) -> Stages:
        """Return the later time of each stage of two ranks, the longer ``moving``, and the bytes of both."""
        out = Stages(*(max(getattr(self, stage), getattr(other, stage)) for stage in self.__struct_fields__))
        force_setattr(out, "came", self.came + other.came)
        force_setattr(out, "announced_bytes", self.announced_bytes + other.announced_bytes)
        return out
