"""The life of an offering: one record, and one table of what each event does in each state. ``docs/engine-room.md`` draws the table.

A request of an engine offers the first tokens of its prompt to other engines, as they are computed. Requests that offer the same transfer
share one offering: the blocks of one are offered. When that request is over, its blocks stay until all ranks are done with them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import ClassVar

from kvxfer.identity import Generation, RequestId, TransferId
from kvxfer.transitions import Life, Transitions, pairs
from kvxfer.values import BlockTable, OfferEnd, Rank


class OfferingState(enum.StrEnum):
    """The states of an offering."""

    RUNNING = "running"  # its request is computed; what is ready of it is offered
    WHOLE = "whole"  # all of it is offered, and its request goes on
    # all of it is offered, and nobody computes it; the blocks are kept until all ranks are done with them
    HELD = "held"
    WITHDRAWN = "withdrawn"  # as held, but nobody may read it any more
    ABANDONED = "abandoned"  # its request has failed; what may be read of it is pinned until all ranks are done with it
    CLOSED = "closed"  # over; the record goes with its request


class OfferingEvent(enum.StrEnum):
    """What happens to an offering."""

    ALL_OFFERED = "all of it offered"
    RESTART = "blocks taken away or changed, or one more consumer"
    FINISH = "request over, all is computed"
    FAIL = "request over, not all is computed"
    FAIL_READ = "request over, not all is computed, others may be reading"
    WITHDRAW = "withdrawn, lease over or declined by all"
    DONE = "all ranks are done with it"
    DONE_EARLIER = "all ranks are done with an earlier generation"


_S, _E = OfferingState, OfferingEvent
_COMPUTED = (_S.RUNNING, _S.WHOLE)
_TRACKED = (*_COMPUTED, _S.HELD, _S.WITHDRAWN)
_ENDS = (_E.FINISH, _E.FAIL, _E.FAIL_READ)

OFFERING: Transitions[OfferingState, OfferingEvent] = Transitions(
    moves={
        (_S.RUNNING, _E.ALL_OFFERED): _S.WHOLE,
        (_S.WHOLE, _E.RESTART): _S.RUNNING,
        **{(s, _E.FINISH): _S.HELD for s in _COMPUTED},
        **{(s, _E.FAIL): _S.CLOSED for s in _COMPUTED},
        **{(s, _E.FAIL_READ): _S.ABANDONED for s in _COMPUTED},
        **{(s, _E.WITHDRAW): _S.CLOSED for s in _COMPUTED},
        **{(s, e): _S.CLOSED for s in _COMPUTED for e in (_E.DONE, _E.DONE_EARLIER)},
        **{(_S.HELD, e): _S.WITHDRAWN for e in (_E.WITHDRAW, _E.DONE_EARLIER)},
        **{(s, _E.DONE): _S.CLOSED for s in (_S.HELD, _S.WITHDRAWN, _S.ABANDONED)},
    },
    ignored={
        "nothing of it was whole": frozenset({(_S.RUNNING, _E.RESTART)}),
        "nobody may read it any more": pairs((_S.WITHDRAWN, _S.ABANDONED, _S.CLOSED), (_E.WITHDRAW,)),
        "a rank has yet to report the last one": pairs((_S.WITHDRAWN, _S.ABANDONED), (_E.DONE_EARLIER,)),
        "it is closed": pairs((_S.CLOSED,), (_E.DONE, _E.DONE_EARLIER, *_ENDS)),
    },
    never={
        "all of it is offered once": pairs(set(_S) - {_S.RUNNING}, (_E.ALL_OFFERED,)),
        "nobody computes it": pairs(set(_S) - set(_COMPUTED), (_E.RESTART,)),
        "its request is over already": pairs((_S.HELD, _S.WITHDRAWN, _S.ABANDONED), _ENDS),
    },
)


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks of an offering that stay as they are until all ranks are done with a generation, whatever the engine does with them."""

    generation: Generation
    blocks: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Offering(Life[OfferingState, OfferingEvent]):
    """One transfer that is offered. What is listed in ``blocks`` has been offered in ``generation``."""

    table: ClassVar = OFFERING

    request: RequestId  # the engine's name of the request whose blocks are offered; empty: they are no request's
    answer: str  # the name of the answer to that request
    transfer: TransferId
    digest: bytes
    total: int  # how many tokens will be offered in the end
    consumers: int  # how many engines have not declined it
    stops: bool  # whether nothing is computed after ``total``
    born: Generation  # the first generation, which no other offering has
    generation: Generation
    blocks: BlockTable
    state: OfferingState = OfferingState.RUNNING
    over: bool = False  # whether the request is over
    namesake: bool = False  # whether another request has the name of this one, whose blocks are held
    tokens: int = 0  # how many tokens are offered
    progress: int = 0  # how many tokens are computed after the last step; may exceed ``total``
    changed: bool = False  # whether the workers have to hear of it with the next step
    answers: set[str] = field(default_factory=set)  # those that tell of it: a consumer each
    sharers: dict[RequestId, str] = field(default_factory=dict)  # other requests that offer it, and their answers

    end: BlockTable | None = None  # the blocks that windows held of the end of the prompt, if they are pinned
    running: Pin | None = None  # what others may be reading while its request runs
    pins: list[Pin] = field(default_factory=list)  # what the engine has given up, or never had
    done: dict[Rank, Generation] = field(default_factory=dict)  # up to which generation each rank is
    quiet: dict[Rank, Generation] = field(default_factory=dict)  # up to which none is read from each rank

    came_at: float = 0.0  # when it was offered first
    begun_at: float = 0.0  # when the first tokens of it were computed
    whole_at: float = 0.0  # when all of it was
    ended: OfferEnd | None = None  # how, once a rank has said so

    @property
    def name(self) -> RequestId | TransferId:
        """What logs call it: the request, or the transfer of blocks that are no request's."""
        return self.request or self.transfer

    @property
    def computed(self) -> bool:
        """Whether its request runs, and what that computes is offered."""
        return self.state in _COMPUTED

    @property
    def offered(self) -> bool:
        """Whether it is offered, or will be."""
        return self.state in _COMPUTED or self.state is _S.HELD

    @property
    def held(self) -> bool:
        """Whether its blocks are kept, though nobody computes it, until all ranks are done with them."""
        return self.state in (_S.HELD, _S.WITHDRAWN)

    @property
    def tracked(self) -> bool:
        """Whether it is computed, or kept for others."""
        return self.state in _TRACKED

    @property
    def final(self) -> bool:
        """Whether all of it has been offered in this generation."""
        return self.state is _S.WHOLE or self.state is _S.HELD
