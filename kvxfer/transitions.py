"""What a table of states and events is: for every pair it says where it leads, why it is ignored, or why it never happens."""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

__all__ = ["Bulkhead", "IllegalTransition", "Life", "Transitions", "pairs"]

S = TypeVar("S", bound=enum.StrEnum)
E = TypeVar("E", bound=enum.StrEnum)


class IllegalTransition(RuntimeError):
    """An event that by a table never happens: a bug in kvxfer. It ends what it happens to: at the door of that room it is logged."""


class _Leads(dict[tuple[S, E], S | None]):
    """Where each pair leads that may happen; ``None`` if it is ignored. Any other raises."""

    def __init__(self, table: Transitions[S, E]) -> None:
        super().__init__(table.moves)
        self._never = table.never
        for ignored in table.ignored.values():
            self |= dict.fromkeys(ignored)

    def __missing__(self, pair: tuple[S, E]) -> S | None:
        why = next((why for why, never in self._never.items() if pair in never), "no table knows of it")
        raise IllegalTransition(f"{pair[1]!r} in state {pair[0]!r}: {why}")


@dataclass(frozen=True)
class Transitions(Generic[S, E]):
    """A table of what each stimulus does in each state."""

    moves: Mapping[tuple[S, E], S]  # the next state for a state and a stimulus
    ignored: Mapping[str, frozenset[tuple[S, E]]]  # pairs in which the stimulus is ignored, by the reason
    never: Mapping[str, frozenset[tuple[S, E]]]  # pairs that never happen, by the reason; they raise
    # the state after each pair that may happen; ``None`` if it is ignored. Looking up any other raises `IllegalTransition`
    leads: Mapping[tuple[S, E], S | None] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leads", _Leads(self))

    def after(self, state: S, stimulus: E) -> S | None:
        """Return the next state, or ``None`` if the stimulus is ignored.

        Raises:
            IllegalTransition: The pair is one that never happens. Nothing has been changed.
        """
        return self.leads[state, stimulus]


class Life(Generic[S, E]):
    """A record that is always in one state of a table."""

    __slots__ = ()
    table: ClassVar[Transitions[Any, Any]]  # the table, the same for all records of a class
    state: S  # where it is

    def on(self, event: E) -> bool:
        """Make the move that an event leads to; return False if it is ignored.

        Raises:
            IllegalTransition: By the table it never happens here. Nothing has been changed.
        """
        after = self.table.leads[self.state, event]  # not by a call: every transfer comes here many times
        if after is None:
            return False
        self.state = after  # type: ignore[misc]  # a slot of the record
        return True


def _raised(owner: Hashable, bug: IllegalTransition) -> None:
    raise bug


class Bulkhead:
    """The one place where a bug of a table is caught: it ends what it happens to, and the caller goes on with the rest.

    Attributes:
        broken: Called with the owner of the record and the bug; without it the bug is raised.
    """

    __slots__ = ("broken",)

    def __init__(self) -> None:
        self.broken: Callable[[Any, IllegalTransition], None] = _raised

    def of(self, owner: Hashable) -> _Guard:
        """Return a context for what is done to the records of an owner."""
        return _Guard(self, owner)


class _Guard:
    __slots__ = ("_door", "_owner")

    def __init__(self, door: Bulkhead, owner: Hashable) -> None:
        self._door, self._owner = door, owner

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        if not isinstance(error, IllegalTransition):
            return False
        self._door.broken(self._owner, error)
        return True


def pairs(states: Iterable[S], events: Iterable[E]) -> frozenset[tuple[S, E]]:
    """Return all pairs of these states and events."""
    known = tuple(events)
    return frozenset((s, e) for s in states for e in known)
