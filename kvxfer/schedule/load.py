"""The life of a load: one record, and one table of what each event does in each state. ``docs/engine-room.md`` draws the table.

A request of an engine loads the first tokens of its prompt from another engine, in one of two ways, which vLLM calls sync and async:

- async: it is given blocks, the workers fill them, and it runs in a later step (``MOVING``);
- sync: the workers fill blocks that the pool has lent, before the request has any (``AHEAD``). Once all of it is there (``HERE``),
  the request is admitted, and the workers copy the blocks in that very step.

What the engine is told of an end and the moment from which nothing writes to the blocks any more are two events. So a load that the
engine knows to be over may live on for a while (``UNQUIET``), and another one must not have its name until it is closed.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import ClassVar

from kvxfer.failures import Failure
from kvxfer.identity import Generation, RequestId, Source, TransferId
from kvxfer.schedule.commands import RankResult
from kvxfer.transitions import Life, Transitions, pairs
from kvxfer.values import BlockTable, Rank, Stages


class LoadState(enum.StrEnum):
    """The states of one request's load."""

    WAITING = "waiting"  # its producer is asked whether it has begun
    OPEN = "open"  # it may be fetched
    SHARED = "shared"  # another request of the transfer fetches it
    AHEAD = "ahead"  # sync: on its way to lent blocks
    HERE = "here"  # sync: all of it is in the lent blocks, and nothing writes to them
    ADMITTED = "admitted"  # sync: the next step copies it into the request's own blocks
    COPYING = "copying"  # sync: a step copies it
    ABANDONED = "abandoned"  # sync: nobody needs it any more, or it has failed; the lent blocks may still be written to
    MOVING = "moving"  # async: on its way to the request's blocks
    CANCELLED = "cancelled"  # async: nobody needs it any more, or it has failed; not all ranks have reported its end
    # async: the engine knows that it has failed; its blocks, which are pinned, may still be written to
    UNQUIET = "unquiet"
    CLOSED = "closed"  # nothing of it comes, now or later; the record goes with its request


class LoadEvent(enum.StrEnum):
    """What happens to a load."""

    BEGUN = "producer has begun, or cannot be asked"
    FETCH = "admitted: fetched into its blocks"
    FETCH_AHEAD = "fetched into lent blocks"
    SIBLING_FETCHES = "another request fetches the transfer"
    SIBLING_ENDS = "another request has closed the transfer"
    ARRIVED = "delivered on all ranks, and quiet"
    ADMIT = "admitted: to be copied"
    SHIPPED = "its copy goes with a step"
    COPIED = "copied on all ranks"
    NOT_NEEDED = "admitted without it"
    TAKE_BLOCKS = "its blocks are taken away"
    GIVE_UP = "given up, or the request is over"
    FAILED = "failed on a rank"
    ENDED = "end reported to the engine"
    ENDED_UNQUIET = "end reported to the engine, a rank may still write"
    QUIET = "no rank writes any more"


_S, _E = LoadState, LoadEvent
_BEFORE = (_S.WAITING, _S.OPEN, _S.SHARED)
_SYNC = (_S.AHEAD, _S.HERE, _S.ADMITTED, _S.COPYING, _S.ABANDONED)
_UNDER_WAY = (_S.MOVING, _S.CANCELLED)
_FILLED = (*_UNDER_WAY, _S.AHEAD, _S.ABANDONED, _S.UNQUIET)
_AWAY = (_E.TAKE_BLOCKS, _E.GIVE_UP)


def _but(*states: LoadState) -> set[LoadState]:
    return set(_S) - set(states)


LOAD: Transitions[LoadState, LoadEvent] = Transitions(
    moves={
        (_S.WAITING, _E.BEGUN): _S.OPEN,
        **{(s, _E.SIBLING_FETCHES): _S.SHARED for s in (_S.WAITING, _S.OPEN)},
        **{(s, _E.SIBLING_ENDS): _S.CLOSED for s in _BEFORE},
        **{(s, _E.GIVE_UP): _S.CLOSED for s in _BEFORE},
        **{(s, _E.NOT_NEEDED): _S.CLOSED for s in (_S.WAITING, _S.OPEN)},
        # sync
        (_S.OPEN, _E.FETCH_AHEAD): _S.AHEAD,
        (_S.AHEAD, _E.ARRIVED): _S.HERE,
        (_S.HERE, _E.ADMIT): _S.ADMITTED,
        (_S.ADMITTED, _E.SHIPPED): _S.COPYING,
        (_S.COPYING, _E.COPIED): _S.CLOSED,
        **{(_S.AHEAD, e): _S.ABANDONED for e in (*_AWAY, _E.NOT_NEEDED, _E.FAILED)},
        **{(s, e): _S.CLOSED for s in (_S.HERE, _S.ADMITTED) for e in (*_AWAY, _E.NOT_NEEDED)},
        (_S.ABANDONED, _E.QUIET): _S.CLOSED,
        # async
        (_S.OPEN, _E.FETCH): _S.MOVING,
        **{(_S.MOVING, e): _S.CANCELLED for e in (*_AWAY, _E.FAILED)},
        **{(s, _E.ENDED): _S.CLOSED for s in _UNDER_WAY},
        (_S.CANCELLED, _E.ENDED_UNQUIET): _S.UNQUIET,
        (_S.UNQUIET, _E.QUIET): _S.CLOSED,
    },
    ignored={
        "it does not wait for its producer": pairs(_but(_S.WAITING), (_E.BEGUN,)),
        "it is over, or ending, by itself": pairs(_but(*_BEFORE), (_E.SIBLING_ENDS,)),
        "it is closed": frozenset({(_S.CLOSED, _E.SIBLING_FETCHES)}),
        "what has not begun can still be loaded": pairs(_BEFORE, (_E.TAKE_BLOCKS,)),
        "another request brings it": frozenset({(_S.SHARED, _E.NOT_NEEDED)}),
        "a copy that a step has begun is finished": pairs((_S.COPYING,), (*_AWAY, _E.NOT_NEEDED)),
        "nobody needs it already": pairs((_S.ABANDONED, _S.CANCELLED, _S.CLOSED), (*_AWAY, _E.NOT_NEEDED)),
        "it has failed, or been given up, already": pairs((_S.ABANDONED, _S.CANCELLED), (_E.FAILED,)),
        "its tokens are on their way": frozenset({(_S.MOVING, _E.NOT_NEEDED)}),
        "its end is known": pairs((_S.UNQUIET,), (*_AWAY, _E.NOT_NEEDED, _E.FAILED)),
        "the engine gets the report next": pairs(_UNDER_WAY, (_E.QUIET,)),
    },
    never={
        "only what is open is fetched": pairs(_but(_S.OPEN), (_E.FETCH, _E.FETCH_AHEAD)),
        "one request of a transfer fetches it, once": pairs(
            _but(_S.WAITING, _S.OPEN, _S.CLOSED), (_E.SIBLING_FETCHES,)
        ),
        "only what is on its way to lent blocks arrives there": pairs(_but(_S.AHEAD), (_E.ARRIVED,)),
        "only what is here is copied": pairs(_but(_S.HERE), (_E.ADMIT,)),
        "only what was admitted goes with a step": pairs(_but(_S.ADMITTED), (_E.SHIPPED,)),
        "only what a step copies has been copied": pairs(_but(_S.COPYING), (_E.COPIED,)),
        "nothing is on its way": pairs((*_BEFORE, _S.HERE, _S.ADMITTED, _S.COPYING, _S.CLOSED), (_E.FAILED,)),
        "only the end of what the workers fetch is told, once": pairs(_but(*_UNDER_WAY), (_E.ENDED, _E.ENDED_UNQUIET))
        | {(_S.MOVING, _E.ENDED_UNQUIET)},
        "only blocks that may be written to become quiet": pairs(
            (*_BEFORE, _S.AHEAD, _S.HERE, _S.ADMITTED, _S.COPYING, _S.CLOSED), (_E.QUIET,)
        ),
    },
)


class LoadAction(enum.StrEnum):
    """What is done with a move."""

    CANCEL = "workers are told to cancel it"
    FILLED = "its blocks may be read, and are not filled any more"
    LET_GO = "its blocks may be used again"
    NOT_COPIED = "the blocks to which it was to be copied may be filled"
    CLOSE = "its transfer is not fetched any more"
    END = "its record goes, once its request is over"


_A = LoadAction

ENTERED: Mapping[LoadState, tuple[LoadAction, ...]] = {
    _S.HERE: (_A.FILLED,),
    _S.ADMITTED: (_A.CLOSE,),  # not before: only now can the other requests of its transfer find it in the prefix cache
    _S.ABANDONED: (_A.CANCEL, _A.CLOSE),
    _S.CANCELLED: (_A.CANCEL, _A.CLOSE),
    _S.CLOSED: (_A.LET_GO, _A.CLOSE, _A.END),
}
"""What is done when a load comes to a state, in this order."""
LEFT: Mapping[LoadState, tuple[LoadAction, ...]] = {_S.ADMITTED: (_A.NOT_COPIED,)}
"""What is done before that, when it leaves one."""


@dataclass(slots=True, eq=False)
class LoadedTransfer:
    """One transfer, and the loads of all requests of this engine that load it: one of them fetches it, at most once."""

    name: TransferId
    digest: bytes
    source: Source
    tokens: int
    offered: bool
    enough: int
    patience: float = 0.0  # seconds within which its first part must come; 0: the agent's setting
    # those whose requests are not over, and that of the request that fetches it until it is closed
    loads: list[Load] = field(default_factory=list)
    answers: set[str | None] = field(default_factory=set)  # the names of the answers that have told of it
    closed: bool = False  # whether it will not be fetched any more


@dataclass(slots=True, eq=False)
class Load(Life[LoadState, LoadEvent]):
    """One request's load. The parts that fill it in are named below; nothing of a load is kept elsewhere."""

    table: ClassVar = LOAD

    request: RequestId  # the engine's name of the request
    transfer: LoadedTransfer
    state: LoadState  # where it is; see ``LOAD``
    over: bool = False  # whether the engine has said that the request is over
    computed: int = 0  # the local tokens when the engine asked last

    fetched: int | None = None  # the number of its fetch; None: there is none yet
    blocks: BlockTable = BlockTable()  # the blocks that the fetch fills: the request's own, or lent ones
    start: int = 0  # the first token that it brings
    end: int = 0  # the token after the last

    results: dict[Rank, RankResult] = field(default_factory=dict)  # how it has ended, by rank
    # whether its blocks are pinned: lent ones always, and the request's own while it has failed and may still write to them
    pinned: bool = False
    failure: Failure | None = None  # why it has failed on some rank

    tried: bool = False  # sync: whether it has been considered
    expected: float = 0.0  # sync: the seconds that it should take
    waited: bool = False  # sync: whether a step has waited for it in vain
    promised: int = 0  # sync: how many tokens are here, as the engine was told last
    into: BlockTable = BlockTable()  # sync: the request's blocks to which it is copied
    copied: dict[Rank, float] = field(default_factory=dict)  # sync: the seconds that each rank took to copy it

    # who has named the source of a prefix that was asked for; None: the source has told of it itself
    kind: str | None = None

    came_at: float = 0.0  # when the request came
    found_at: float = 0.0  # when it was decided to load what the answer to a question offers
    asked_at: float = 0.0  # when its producer was asked last whether it has begun
    fetched_at: float = 0.0  # when its fetch was sent
    over_at: float = 0.0  # when it was known how it ends, or that it will not begin; told once, to all who tell of it

    @property
    def is_sync(self) -> bool:
        """Whether it goes into lent blocks, to be copied in the step that admits the request."""
        return self.state in _SYNC

    @property
    def under_way(self) -> bool:
        """Whether the engine has no report yet how it ends, though its blocks are being filled."""
        return self.state in _UNDER_WAY

    @property
    def expects_results(self) -> bool:
        """Whether a rank may have something to say that is not known yet."""
        return self.state in _FILLED

    @property
    def writing(self) -> bool:
        """Whether it has failed on a rank that may still write."""
        return any(one.failure is not None and not one.quiet for one in self.results.values())

    def quiet(self, ranks: int) -> bool:
        """Return whether nothing writes to its blocks any more on any of the ranks."""
        return len(self.results) >= ranks and all(one.quiet for one in self.results.values())

    @property
    def generations(self) -> set[Generation]:
        """What the ranks were delivered of.

        Everything that a rank has is of one generation; ranks do not know of each other, and a producer that preempts a request between
        two of them gives them different ones, which do not go together.
        """
        return {one.generation for one in self.results.values() if one.generation is not None}

    @property
    def short(self) -> int | None:
        """The token up to which it was delivered, if not whole."""
        return min((one.short for one in self.results.values() if one.short is not None), default=None)

    @property
    def stages(self) -> Stages | None:
        """When it reached each stage, on the slowest rank."""
        return reduce(Stages.slowest, (one.stages for one in self.results.values())) if self.results else None

    def unasked(self, ranks: int) -> bool:
        """Return whether none of the ranks has asked its producer, so that none is counted there."""
        return len(self.results) == ranks and all(one.stages.unasked for one in self.results.values())

    @property
    def copier(self) -> Hashable:
        """Under which the blocks are claimed to which it is copied; the load itself is the holder of those that it fills."""
        return self, "copied"
