"""What a scheduler half ships to its workers: values only, so that they cross processes by pickle or msgpack."""

from typing import Literal

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.identity import Generation, TransferId

# A request's block table: per KV-cache group the block ids by position (block `i` of a group holds tokens
# `[i * group.block, (i + 1) * group.block)`); -1 where there is no block.
Table = tuple[tuple[int, ...], ...]

NULL = -1


class ScheduleError(KvxferError):
    """The engine's connector called the scheduler half in an order that makes no sense: a bug in the connector."""


class Group(msgspec.Struct, frozen=True):
    """A KV-cache group: the layers that share one block table.

    kind: "full" keeps every block for the life of a request; "window" gives up blocks that fall behind (sliding
        window, chunked local attention); "state" keeps a recurrent state, in the block of the last token.
    block: tokens per block of the scheduler's (logical) block table.
    """

    kind: Literal["full", "window", "state"]
    block: int


class Source(msgspec.Struct, frozen=True):
    """An engine, as others reach it: its directory's address, and its epoch (fresh each time it starts)."""

    host: str
    port: int
    epoch: int


class Offer(msgspec.Struct, frozen=True):
    """A producer's blocks that hold the KV of one prompt, as far as it is computed.

    True once the step that it travels with has run: a worker publishes it behind a fence recorded after that step's
    forward pass (and drafting). An increment repeats the whole table known so far; within one generation `tokens`
    only grows and a block once listed never changes, so a worker diffs.

    generation: grows with every offer that is not a continuation of the last one; never used twice by one epoch.
    tokens: tokens `[0, tokens)` are complete in every "full" group, which lists exactly `ceil(tokens / block)`
        blocks. Smaller than the transfer only if not final, and then no block is half filled.
    blocks: one entry per group. "window" and "state" groups stay empty until the final offer, and list -1 where
        the engine has given a block up; a reader that wants a block that is -1 here must fail the transfer.
    final: every group is complete. Nothing more follows in this generation, except perhaps a Revoke.
    """

    transfer: TransferId
    digest: bytes
    generation: Generation
    tokens: int
    blocks: Table
    final: bool


class Revoke(msgspec.Struct, frozen=True):
    """A generation is over: its blocks may be reused from the step on that this travels with.

    Workers take it in before that step's forward pass and confirm no read of this generation afterwards. It ends
    all older generations of the transfer, too, and may come for one that nothing was offered of.

    gone: no later generation will come; a waiting reader fails at once. Otherwise (preemption) it may go on waiting.
    """

    transfer: TransferId
    generation: Generation
    reason: str
    gone: bool


class Want(msgspec.Struct, frozen=True):
    """A consumer asks for tokens `[start, tokens)` of a transfer.

    blocks: per group the destination by position; -1 = not wanted (no block here, or the local prefix cache has it).
        A block that is wanted may begin before `start`; those tokens are its own and must not be overwritten.
    source: the producer; own: this engine's own address, for producers that dial back.
    """

    transfer: TransferId
    digest: bytes
    source: Source
    blocks: Table
    start: int
    tokens: int
    own: Source | None


class Cancel(msgspec.Struct, frozen=True):
    """The engine no longer needs what it wanted. Its blocks are to be reported quiet as after any other end."""

    transfer: TransferId
    reason: str


class StepCommands(msgspec.Struct, frozen=True):
    """Everything that the workers must know with one step; false if there is nothing.

    Workers apply `revokes` before the forward pass, then `cancels`, `wants`, and `offers` after it.
    """

    offers: tuple[Offer, ...] = ()
    revokes: tuple[Revoke, ...] = ()
    wants: tuple[Want, ...] = ()
    cancels: tuple[Cancel, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offers or self.revokes or self.wants or self.cancels)


class Release(msgspec.Struct, frozen=True):
    """A consumer will never ask for this transfer: the producer may drop it.

    Not for workers, who never heard of the transfer: the scheduler half tells the producer's directory itself.
    """

    transfer: TransferId
    source: Source
    reason: str
