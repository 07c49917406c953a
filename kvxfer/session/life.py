"""The life of a transfer as tables: every pair of a state and a stimulus is decided here, either by where it leads or
by why it is ignored. ``docs/session.md`` draws them; ``tests/session/test_life.py`` holds that no pair is missing.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

__all__ = ["LANE", "SERVE", "LaneEvent", "LaneState", "Life", "ServeEvent", "ServeState"]

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


@dataclass(frozen=True)
class Life(Generic[S, E]):
    """``moves``: where a stimulus leads. ``ignored``: stimuli that leave a state alone, by the reason. ``never``: pairs
    that the machine that uses the table does not bring about."""

    moves: Mapping[tuple[S, E], S]
    ignored: Mapping[str, frozenset[tuple[S, E]]]
    never: Mapping[str, frozenset[tuple[S, E]]]

    def after(self, state: S, stimulus: E) -> S | None:
        """The next state, or ``None`` when the stimulus is ignored."""
        return self.moves.get((state, stimulus))


def _pairs(states: Any, events: Any) -> frozenset[Any]:
    return frozenset((s, e) for s in states for e in events)


class LaneState(enum.StrEnum):
    """The consumer's side of a transfer from one producer rank."""

    LINKING = "linking"  # the link is being made
    WANTING = "wanting"  # the producer knows what we want; nothing has come
    MOVING = "moving"  # parts are moving
    CHECKING = "checking"  # all bytes are here; the producer is asked whether they can be trusted
    PAUSED = "paused"  # the attempt is void; the next begins when nothing of it moves any more
    DELIVERED = "delivered"
    FAILED = "failed"


class LaneEvent(enum.StrEnum):
    LINK_UP = "link up"
    LINK_RESET = "link lost, dialled anew"
    LINK_DOWN = "link lost for good"
    HAVE = "have"
    COMPLETE = "all parts complete"
    HELD = "all parts complete, seen to have held"
    VERDICT = "verdict"
    GONE = "gone"
    GONE_AGAIN = "gone, may come again"
    QUIET = "attempt quiet"
    FAIL = "error, deadline or cancel"


_L, _e = LaneState, LaneEvent
_OPEN = (_L.LINKING, _L.WANTING, _L.MOVING, _L.CHECKING, _L.PAUSED)
_TRIED = (_L.WANTING, _L.MOVING, _L.CHECKING)
_OVER = (_L.DELIVERED, _L.FAILED)

LANE: Life[LaneState, LaneEvent] = Life(
    moves={
        (_L.LINKING, _e.LINK_UP): _L.WANTING,
        (_L.WANTING, _e.HAVE): _L.MOVING,
        (_L.MOVING, _e.HAVE): _L.MOVING,
        (_L.MOVING, _e.COMPLETE): _L.CHECKING,
        (_L.MOVING, _e.HELD): _L.DELIVERED,
        (_L.CHECKING, _e.VERDICT): _L.DELIVERED,
        **{(s, _e.LINK_RESET): _L.PAUSED for s in (_L.WANTING, _L.MOVING)},
        **{(s, _e.GONE_AGAIN): _L.PAUSED for s in _TRIED},
        (_L.PAUSED, _e.QUIET): _L.LINKING,
        **{(s, e): _L.FAILED for s in _OPEN for e in (_e.LINK_DOWN, _e.FAIL)},
        **{(s, _e.GONE): _L.FAILED for s in _TRIED},
    },
    ignored={
        "the attempt that it speaks of is over": _pairs(
            (_L.LINKING, _L.PAUSED), (_e.HAVE, _e.VERDICT, _e.GONE, _e.GONE_AGAIN)
        ),
        "the outcome stands": _pairs(_OVER, set(_e) - {_e.COMPLETE, _e.HELD, _e.QUIET, _e.LINK_UP}),
        "the verdict is asked for once all parts are here": _pairs((_L.WANTING, _L.MOVING), (_e.VERDICT,)),
        "the parts cover all that is wanted": frozenset({(_L.CHECKING, _e.HAVE)}),
        "the bytes are here: the question is put again over the next link": frozenset({(_L.CHECKING, _e.LINK_RESET)}),
        "there is no attempt that could be void": _pairs((_L.LINKING, _L.PAUSED), (_e.LINK_RESET,)),
    },
    never={
        "links come up under lanes that wait for one": _pairs(set(_L) - {_L.LINKING}, (_e.LINK_UP,)),
        "only moving parts complete": _pairs(set(_L) - {_L.MOVING}, (_e.COMPLETE, _e.HELD)),
        "only a paused lane waits for quiet": _pairs(set(_L) - {_L.PAUSED}, (_e.QUIET,)),
    },
)


class ServeState(enum.StrEnum):
    """The producer's side of one attempt of one consumer rank."""

    WAITING = "waiting"  # wanted, nothing announced yet
    SERVING = "serving"  # at least one part announced
    SETTLED = "settled"  # the consumer has checked and was told yes
    ENDING = "ending"  # over; waiting for our own part batches to end before saying so
    ENDED = "ended"


class ServeEvent(enum.StrEnum):
    ANNOUNCE = "part announced"
    VERDICT = "check: it held"
    STOP = "drop, revoke, expiry or error"
    QUIET = "own parts ended"
    LINK_DOWN = "link lost"


_V, _v = ServeState, ServeEvent

SERVE: Life[ServeState, ServeEvent] = Life(
    moves={
        (_V.WAITING, _v.ANNOUNCE): _V.SERVING,
        (_V.SERVING, _v.ANNOUNCE): _V.SERVING,
        (_V.SERVING, _v.VERDICT): _V.SETTLED,
        (_V.WAITING, _v.STOP): _V.ENDING,
        (_V.SERVING, _v.STOP): _V.ENDING,
        (_V.ENDING, _v.QUIET): _V.ENDED,
        **{(s, _v.LINK_DOWN): _V.ENDED for s in (_V.WAITING, _V.SERVING, _V.ENDING)},
    },
    ignored={
        "gone is on its way": _pairs((_V.ENDING,), (_v.STOP, _v.VERDICT)),
        "the last word has been said": _pairs((_V.SETTLED, _V.ENDED), (_v.STOP, _v.LINK_DOWN)),
    },
    never={
        "nothing is announced to whom has been given up": _pairs((_V.SETTLED, _V.ENDING, _V.ENDED), (_v.ANNOUNCE,)),
        "only what is being served can have held": _pairs(set(_V) - {_V.SERVING, _V.ENDING}, (_v.VERDICT,)),
        "only an ending serve waits for quiet": _pairs(set(_V) - {_V.ENDING}, (_v.QUIET,)),
    },
)
