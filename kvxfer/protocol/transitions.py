"""The life of a transfer as tables.

For every pair of a state and a stimulus they say where it leads, why it is ignored, or why it never happens.
``docs/protocol.md`` draws them; ``tests/test_transitions.py`` checks that no pair is missing.
"""

from __future__ import annotations

import enum

from kvxfer.transitions import IllegalTransition, Transitions
from kvxfer.transitions import pairs as _pairs

__all__ = [
    "RANK_FETCH",
    "IllegalTransition",
    "RANK_SERVE",
    "READER",
    "RankFetchEvent",
    "RankFetchState",
    "ReaderEvent",
    "ReaderState",
    "Transitions",
    "ServeEvent",
    "ServeState",
]


class RankFetchState(enum.StrEnum):
    """The states of a rank fetch, the consumer's side of a transfer from one producer rank."""

    LINKING = "linking"  # the link is being made
    REQUESTED = "requested"  # the producer has been asked; nothing has come
    MOVING = "moving"  # parts are moving
    ARRIVED = "arrived"  # all bytes from this rank are here; those from others may not be
    COMMITTING = "committing"  # all bytes from all ranks are here; the producer is asked whether they can be trusted
    HELD = "held"  # the bytes of this producer rank can be trusted; others are being asked
    PAUSED = "paused"  # the attempt is void; the next begins when nothing of it moves any more
    DELIVERED = "delivered"
    FAILED = "failed"


class RankFetchEvent(enum.StrEnum):
    """What happens to a rank fetch."""

    LINK_UP = "link up"
    LINK_RESET = "link lost, dialled again"
    LINK_DOWN = "link lost, not dialled again"
    PART_READY = "part ready"
    COMPLETE = "all parts complete"
    ASK = "all ranks arrived"
    SEEN = "all ranks arrived, seen to have held"
    COMMIT_ACK = "commit ack"
    ALL_HELD = "all ranks held"
    ANOTHER = "another rank starts over"
    OUTDATED = "a newer generation seen"
    CLOSED = "attempt closed"
    CLOSED_AGAIN = "attempt closed, may come again"
    QUIET = "attempt quiet"
    FAIL = "error, deadline or cancel"


_L, _e = RankFetchState, RankFetchEvent
_OPEN = (_L.LINKING, _L.REQUESTED, _L.MOVING, _L.ARRIVED, _L.COMMITTING, _L.HELD, _L.PAUSED)
_DOUBTED = (_L.REQUESTED, _L.MOVING, _L.ARRIVED, _L.COMMITTING)
_OVER = (_L.DELIVERED, _L.FAILED)
_INSIDE = (_e.LINK_UP, _e.COMPLETE, _e.ASK, _e.SEEN, _e.ALL_HELD, _e.ANOTHER, _e.QUIET)

RANK_FETCH: Transitions[RankFetchState, RankFetchEvent] = Transitions(
    moves={
        (_L.LINKING, _e.LINK_UP): _L.REQUESTED,
        (_L.REQUESTED, _e.PART_READY): _L.MOVING,
        (_L.MOVING, _e.PART_READY): _L.MOVING,
        (_L.MOVING, _e.COMPLETE): _L.ARRIVED,
        (_L.ARRIVED, _e.ASK): _L.COMMITTING,
        (_L.ARRIVED, _e.SEEN): _L.HELD,
        (_L.COMMITTING, _e.COMMIT_ACK): _L.HELD,
        (_L.HELD, _e.ALL_HELD): _L.DELIVERED,
        **{(s, _e.ANOTHER): _L.ARRIVED for s in (_L.COMMITTING, _L.HELD)},
        **{(s, _e.LINK_RESET): _L.PAUSED for s in (_L.REQUESTED, _L.MOVING, _L.ARRIVED)},
        **{(s, _e.CLOSED_AGAIN): _L.PAUSED for s in _DOUBTED},
        **{(s, _e.OUTDATED): _L.PAUSED for s in (_L.MOVING, _L.ARRIVED)},
        (_L.PAUSED, _e.QUIET): _L.LINKING,
        **{(s, e): _L.FAILED for s in _OPEN for e in (_e.LINK_DOWN, _e.FAIL)},
        **{(s, _e.CLOSED): _L.FAILED for s in _DOUBTED},
    },
    ignored={
        "the attempt that it speaks of is over": _pairs(
            (_L.LINKING, _L.PAUSED), (_e.PART_READY, _e.COMMIT_ACK, _e.CLOSED, _e.CLOSED_AGAIN)
        ),
        "the outcome remains": _pairs(_OVER, set(_e) - set(_INSIDE)),
        "the commit is asked for once all ranks have arrived": _pairs(
            (_L.REQUESTED, _L.MOVING, _L.ARRIVED), (_e.COMMIT_ACK,)
        ),
        "it is answered already": frozenset({(_L.HELD, _e.COMMIT_ACK)}),
        "it held when it had to; should it have to once more, the producer is asked again": _pairs(
            (_L.HELD,), (_e.CLOSED, _e.CLOSED_AGAIN)
        ),
        "the parts cover all that is wanted": _pairs((_L.ARRIVED, _L.COMMITTING, _L.HELD), (_e.PART_READY,)),
        "the bytes are here: the question is put again over the next link": _pairs(
            (_L.COMMITTING, _L.HELD), (_e.LINK_RESET,)
        ),
        "there is no attempt that could be void": _pairs((_L.LINKING, _L.PAUSED), (_e.LINK_RESET, _e.OUTDATED)),
        "nothing has been asked yet": _pairs(
            (_L.LINKING, _L.REQUESTED, _L.MOVING, _L.ARRIVED, _L.PAUSED), (_e.ANOTHER,)
        ),
    },
    never={
        "links come up under rank fetches that wait for one": _pairs(set(_L) - {_L.LINKING}, (_e.LINK_UP,)),
        "only moving parts complete": _pairs(set(_L) - {_L.MOVING}, (_e.COMPLETE,)),
        "it is asked, or looked, once all ranks have arrived": _pairs(set(_L) - {_L.ARRIVED}, (_e.ASK, _e.SEEN)),
        "all ranks hold, or none is delivered": _pairs(set(_L) - {_L.HELD}, (_e.ALL_HELD,)),
        "nothing was announced here yet": frozenset({(_L.REQUESTED, _e.OUTDATED)}),
        "what others announce, they do after they have started over": _pairs((_L.COMMITTING, _L.HELD), (_e.OUTDATED,)),
        "no rank starts over after the outcome": _pairs(_OVER, (_e.ANOTHER,)),
        "only a paused rank waits for quiet": _pairs(set(_L) - {_L.PAUSED}, (_e.QUIET,)),
    },
)


class ServeState(enum.StrEnum):
    """The states of a rank serve, the producer's side of one attempt of one consumer rank."""

    WAITING = "waiting"  # wanted, nothing announced yet
    SERVING = "serving"  # at least one part announced
    SETTLED = "settled"  # the consumer has everything, and trusts it
    ENDING = "ending"  # over; the consumer is told once nothing of it moves on this side
    ENDED = "ended"


class ServeEvent(enum.StrEnum):
    """What happens to a rank serve."""

    ANNOUNCE = "part announced"
    SETTLE = "it held for all ranks"
    STOP = "given up, revoked, expired or failed"
    QUIET = "own parts ended"
    LINK_DOWN = "link lost"


_V, _v = ServeState, ServeEvent

RANK_SERVE: Transitions[ServeState, ServeEvent] = Transitions(
    moves={
        (_V.WAITING, _v.ANNOUNCE): _V.SERVING,
        (_V.SERVING, _v.ANNOUNCE): _V.SERVING,
        (_V.SERVING, _v.SETTLE): _V.SETTLED,
        (_V.WAITING, _v.STOP): _V.ENDING,
        (_V.SERVING, _v.STOP): _V.ENDING,
        (_V.ENDING, _v.QUIET): _V.ENDED,
        **{(s, _v.LINK_DOWN): _V.ENDED for s in (_V.WAITING, _V.SERVING, _V.ENDING)},
    },
    ignored={
        "the peer will be told that the attempt is closed": _pairs((_V.ENDING,), (_v.STOP, _v.SETTLE)),
        "the final reply has been sent": _pairs((_V.SETTLED, _V.ENDED), (_v.STOP, _v.LINK_DOWN, _v.SETTLE)),
    },
    never={
        "a peer that was given up is told nothing more": _pairs((_V.SETTLED, _V.ENDING, _V.ENDED), (_v.ANNOUNCE,)),
        "only what was announced can be had": frozenset({(_V.WAITING, _v.SETTLE)}),
        "only an ending serve waits for quiet": _pairs(set(_V) - {_V.ENDING}, (_v.QUIET,)),
    },
)


class ReaderState(enum.StrEnum):
    """What a producer rank knows of one reader of an offer: whether it counts towards the end of the offer."""

    UNKNOWN = "unknown"  # nothing is kept of it
    READING = "reading"
    DROPPED = "dropped"  # it wanted what is offered, and has given it up; it counts
    INELIGIBLE = "ineligible"  # it wants more than there is, and does not count
    DELIVERED = "delivered"  # it has everything; it counts


class ReaderEvent(enum.StrEnum):
    """What happens to a reader of an offer."""

    ASK = "asks again"
    WANT = "wants what is offered"
    WANT_MORE = "wants more than is offered"
    WANT_OTHER = "wants it by another digest"
    DROP = "gives it up"
    LEAVE = "lost, and not served over another link"
    SETTLE = "has everything"


_R, _r = ReaderState, ReaderEvent

READER: Transitions[ReaderState, ReaderEvent] = Transitions(
    moves={
        **{(s, _r.WANT): _R.READING for s in (_R.UNKNOWN, _R.READING, _R.INELIGIBLE)},
        **{(s, _r.WANT_MORE): _R.INELIGIBLE for s in (_R.UNKNOWN, _R.READING)},
        **{(s, _r.WANT_OTHER): _R.UNKNOWN for s in (_R.READING, _R.INELIGIBLE)},
        **{(s, _r.DROP): _R.DROPPED for s in (_R.UNKNOWN, _R.READING, _R.DROPPED)},
        **{(s, _r.SETTLE): _R.DELIVERED for s in _R if s is not _R.DELIVERED},
        (_R.READING, _r.LEAVE): _R.UNKNOWN,
        (_R.DROPPED, _r.ASK): _R.READING,
        (_R.INELIGIBLE, _r.ASK): _R.UNKNOWN,
    },
    ignored={
        "what it wants is seen once there is an offer": _pairs((_R.UNKNOWN, _R.READING), (_r.ASK,)),
        "nothing is kept of it": _pairs((_R.UNKNOWN,), (_r.WANT_OTHER, _r.LEAVE)),
        "it does not count": _pairs((_R.INELIGIBLE,), (_r.WANT_MORE, _r.DROP, _r.LEAVE)),
        "it wants no more": frozenset({(_R.DROPPED, _r.LEAVE)}),
        "it has everything": _pairs((_R.DELIVERED,), _r),
    },
    never={
        "one that has dropped it is served only after it has asked again": _pairs(
            (_R.DROPPED,), (_r.WANT, _r.WANT_MORE, _r.WANT_OTHER)
        )
    },
)
