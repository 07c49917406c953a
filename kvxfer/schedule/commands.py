"""What a scheduler half ships to its workers: values, that cross processes by pickle or msgpack."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvxfer.errors import KvxferError
from kvxfer.identity import Generation, Source, TransferId

# A request's block table: per KV-cache group the block ids by position (block `i` of a group holds tokens
# `[i * group.block, (i + 1) * group.block)`); -1 where there is no block.
Table = tuple[tuple[int, ...], ...]

NULL = -1


class ScheduleError(KvxferError):
    """A call that makes no sense at this point: a bug in the connector that made it."""


class Group(msgspec.Struct, frozen=True):
    """A KV-cache group: the layers that share one block table.

    kind: "full" keeps every block for the life of a request; "window" gives up blocks that fall behind
        (sliding window, chunked local attention); "state" keeps a recurrent state, in the block of the last
        token, and perhaps states after fewer tokens in blocks before it, which nobody takes over; "local" is
        moved by nobody, and listed by no offer and no want.
    block: tokens per block of the scheduler's (logical) block table.
    """

    kind: Literal["full", "window", "state", "local"]
    block: int

    def blocks(self, tokens: int) -> int:
        """How many blocks `tokens` tokens take."""
        return -(-tokens // self.block)

    def taken(self, row: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The blocks of a row that hold what can be moved of `tokens` tokens, by position."""
        if self.kind == "local" or not tokens:
            return ()
        past = self.blocks(tokens)
        return (NULL,) * (past - 1) + tuple(row[past - 1 : past]) if self.kind == "state" else tuple(row[:past])


def rows(groups: Sequence[Group], table: Sequence[Sequence[int]]) -> list[tuple[Group, Sequence[int]]]:
    """Each group with its row of the table; ScheduleError if they do not match."""
    if len(table) != len(groups):
        raise ScheduleError(f"a block table of {len(table)} groups in an engine that has {len(groups)}")
    return list(zip(groups, table, strict=True))


class Offer(msgspec.Struct, frozen=True):
    """A producer's blocks that hold the KV of one prompt, as far as it is computed.

    True once the step that it travels with has run: a worker publishes it behind a fence recorded after that
    step's forward pass (and drafting). An increment repeats the whole table known so far; within one
    generation `tokens` only grows and a block once listed never changes, so a worker diffs.

    generation: grows with every offer that is not a continuation of the last one; never used twice by one
        epoch.
    tokens: tokens `[0, tokens)` are complete in every "full" group, which lists exactly `ceil(tokens /
        block)` blocks. Smaller than the transfer only if not final, and then no block is half filled.
    blocks: one entry per group; see `Group.taken`. "window" and "state" groups stay empty until the final
        offer, and list -1 where the engine has given a block up; a reader that wants a block that is -1 here
        must fail the transfer.
    final: every group is complete; nothing follows but a Revoke. May come before the engine has finished the
        request, which thus may be read before the engine holds its blocks for readers.
    """

    transfer: TransferId
    digest: bytes
    generation: Generation
    tokens: int
    blocks: Table
    final: bool


class Revoke(msgspec.Struct, frozen=True):
    """A generation is over: its blocks may be reused from the step on that this travels with.

    Workers take it in before that step's forward pass and confirm no read of this generation afterwards. It
    ends all older generations of the transfer, too, and may come for one that nothing was offered of.

    gone: the transfer is over; nothing follows, and a worker forgets it once it is quiet. Every transfer that
        a tracker took up ends with exactly one such Revoke, those that all have read included; readers that
        have not read all fail at once. If not gone (preemption), a reader may wait for the next generation.
    """

    transfer: TransferId
    generation: Generation
    reason: str
    gone: bool


class Want(msgspec.Struct, frozen=True):
    """A consumer asks for tokens `[start, tokens)` of a transfer.

    blocks: per group the destination by position; -1 = not wanted (no block here, or the local prefix cache
        has it). A block that is wanted may begin before `start`; those tokens are its own and must not be
        overwritten.
    tokens: where a group is a "state", the number that the producer's final Offer must have: a state of more or
        fewer tokens is another state.
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
    """The engine no longer needs what it wanted. The workers report the end as they report any other."""

    transfer: TransferId
    reason: str


class StepCommands(msgspec.Struct, frozen=True):
    """Everything that the workers must know with one step; false if there is nothing.

    Workers apply `revokes` before the step's forward pass, then `wants` and `cancels`, and `offers` after it.
    """

    offers: tuple[Offer, ...] = ()
    revokes: tuple[Revoke, ...] = ()
    wants: tuple[Want, ...] = ()
    cancels: tuple[Cancel, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.offers or self.revokes or self.wants or self.cancels)


class Release(msgspec.Struct, frozen=True):
    """A consumer will never ask for this transfer: the producer may drop it.

    Not for workers, who never heard of the transfer: the scheduler half tells the producer's directory.
    """

    transfer: TransferId
    digest: bytes
    source: Source
    reason: str
