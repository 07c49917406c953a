"""The readers of an offer, by their agents' epochs: which have it all, which have dropped it, and whether all are done."""

from __future__ import annotations

import enum
from math import lcm

import msgspec
from msgspec import field

__all__ = ["OVER", "ReaderState", "Readers"]


class ReaderState(enum.Enum):
    """What is known of a reader."""

    READING = enum.auto()
    DELIVERED = enum.auto()
    DROPPED = enum.auto()
    INELIGIBLE = enum.auto()  # it wants more than there is, and does not count


class _Reader(msgspec.Struct, frozen=True, gc=False):
    state: ReaderState = ReaderState.READING
    siblings: int = 1  # how many readers its engine has, as it says


_NEW = _Reader()
OVER = (ReaderState.DELIVERED, ReaderState.DROPPED)
"""The states of a reader that wants no more."""


class Readers(msgspec.Struct, gc=False):
    """The readers of what is offered.

    They count only if their digest is that of the offer, so that a consumer with the wrong prompt does not affect the others.
    Each is named by the epoch of its agent.
    """

    _of: dict[int, _Reader] = field(default_factory=dict)

    def state(self, reader: int) -> ReaderState:
        """Return what is known of a reader; one that is not known may still read."""
        return self._of.get(reader, _NEW).state

    def admit(self, reader: int, siblings: int) -> None:
        """Count a reader that wants what is offered; its engine says that it has ``siblings`` readers."""
        known = self._of.get(reader, _NEW)
        state = ReaderState.READING if known.state is ReaderState.INELIGIBLE else known.state
        self._of[reader] = _Reader(state, max(siblings, known.siblings))

    def ask_again(self, reader: int) -> None:
        """Forget that a reader has dropped it or was ineligible."""
        known = self._of.get(reader)
        if known is not None and known.state is ReaderState.DROPPED:
            self._of[reader] = _Reader(ReaderState.READING, known.siblings)
        elif known is not None and known.state is ReaderState.INELIGIBLE:
            del self._of[reader]

    def reject(self, reader: int, eligible: bool) -> None:
        """Count out a reader that wants something that is not offered; one that was ``eligible`` may no longer drop the offer."""
        if self.state(reader) is not ReaderState.DELIVERED:
            self._of.pop(reader, None)
            if eligible:
                self._of[reader] = _Reader(ReaderState.INELIGIBLE)

    def leave(self, reader: int) -> None:
        """Forget a reader that is lost, unless it is done."""
        if self.state(reader) is ReaderState.READING:
            self._of.pop(reader, None)

    def settle(self, reader: int) -> None:
        """Record that a reader has everything."""
        self._of[reader] = _Reader(ReaderState.DELIVERED, self._of.get(reader, _NEW).siblings)

    def drop(self, reader: int, siblings: int) -> None:
        """Count a reader that wanted what is offered, and has given it up."""
        self.admit(reader, siblings)
        if self.state(reader) is ReaderState.READING:
            self._of[reader] = _Reader(ReaderState.DROPPED, self._of[reader].siblings)

    def any(self, state: ReaderState) -> bool:
        """Return whether any reader is in a state."""
        for reader in self._of.values():
            if reader.state is state:
                return True
        return False

    def enough(self, engines: int, states: tuple[ReaderState, ...] = OVER) -> bool:
        """Return whether the readers in these states make up as many engines.

        A reader with ``n`` siblings counts as an ``n``-th engine.
        """
        siblings = [r.siblings for r in self._of.values() if r.state in states]
        unit = lcm(*siblings)  # in whole numbers, because the shares must add up exactly
        return sum([unit // n for n in siblings]) >= engines * unit

    def clear(self) -> None:
        """Forget all readers, because what is offered has changed."""
        self._of.clear()
