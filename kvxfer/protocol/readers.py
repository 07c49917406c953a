"""The readers of an offer, by their agents' epochs: which have it all, which have dropped it, and whether all are done."""

from __future__ import annotations

from math import lcm

import msgspec
from msgspec import field

from kvxfer.protocol.transitions import READER, ReaderEvent, ReaderState


class _Reader(msgspec.Struct, frozen=True, gc=False):
    state: ReaderState = ReaderState.UNKNOWN
    siblings: int = 1  # how many readers its engine has, as it says


_UNKNOWN = _Reader()
OVER = (ReaderState.DELIVERED, ReaderState.DROPPED)
"""The states of a reader that wants no more."""


class Readers(msgspec.Struct, gc=False):
    """The readers of what is offered.

    They count only if their digest is that of the offer, so that a consumer with the wrong prompt does not affect the others.
    Each is named by the epoch of its agent.
    """

    _of: dict[int, _Reader] = field(default_factory=dict)

    def state(self, reader: int) -> ReaderState:
        return self._of.get(reader, _UNKNOWN).state

    def on(self, reader: int, event: ReaderEvent, siblings: int = 1) -> bool:
        """Make the move that an event of a reader leads to; return False if it is ignored.

        ``siblings``: how many readers its engine has, as it says; the most that it ever said counts.

        Raises:
            IllegalTransition: By the table it never happens here. Nothing has been changed.
        """
        known = self._of.get(reader, _UNKNOWN)
        after = READER.leads[known.state, event]  # not by a call: every transfer comes here several times
        if after is None:
            return False
        if after is ReaderState.UNKNOWN:
            del self._of[reader]
        else:
            self._of[reader] = _Reader(after, max(siblings, known.siblings))
        return True

    def any(self, state: ReaderState) -> bool:
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
        return sum(map(unit.__floordiv__, siblings)) >= engines * unit

    def clear(self) -> None:
        """Forget all readers, because what is offered has changed."""
        self._of.clear()
