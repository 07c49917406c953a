"""How consumers have used a producer's slots lately: who comes next, and who must not have many."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Hashable

from kvxfer.protocol.peer import NOBODY, PeerIdentity
from kvxfer.protocol.values import LinkId

__all__ = ["SlotUsage"]

AT_ONCE_S, IN_TIME_S = 0.2, 1.0
"""Who holds a slot for less has taken its piece at once, or at least in time. A piece takes milliseconds."""
HALF_LIFE_S = 1.0
"""The time after which past holding of a slot counts half."""
PROMPT_S, STALLED_S = 10.0, 30.0
"""How long it is remembered that a link has taken a piece at once, and that a slot was taken from it."""


class SlotUsage:
    """The use of slots by each link, and by the peers that they count for. Used by the data thread only."""

    def __init__(self) -> None:
        self._owners: dict[LinkId, PeerIdentity] = {}
        self._spent: dict[Hashable, tuple[float, float]] = {}  # seconds that slots were held, and as of when
        self._prompt: OrderedDict[LinkId, float] = OrderedDict()  # when it last took a piece at once
        self._stalled: OrderedDict[LinkId, float] = OrderedDict()  # when a slot was taken from it

    def know(self, link: LinkId, owner: PeerIdentity) -> None:
        """Record whom a link counts for."""
        self._owners[link] = owner

    def forget(self, link: LinkId) -> None:
        """Forget a link that is closed. What its peer has used still counts."""
        self._owners.pop(link, None)
        self._prompt.pop(link, None)
        self._stalled.pop(link, None)

    def held(self, link: LinkId, seconds: float) -> None:
        """Record that a link has given back a slot, after so many seconds."""
        now = time.monotonic()
        names = self._names(link)
        if (
            names[-1] not in self._spent
        ):  # what is left of others is forgotten then, and not looked through for each slot
            self._spent = {name: used for name, used in self._spent.items() if now - used[1] < 20 * HALF_LIFE_S}
        for name in names:
            self._spent[name] = self._used(name, now) + seconds, now
        if now - self._stalled.get(link, 0.0) < seconds:
            return  # it was taken from the link
        if seconds < IN_TIME_S:
            self._stalled.pop(link, None)
        if seconds < AT_ONCE_S:
            self._prompt.pop(link, None)
            self._prompt[link] = now

    def stall(self, link: LinkId) -> None:
        """Record that a slot is taken from a link, which took nothing."""
        self._prompt.pop(link, None)
        self._stalled.pop(link, None)
        self._stalled[link] = time.monotonic()

    def stalled(self, link: LinkId) -> bool:
        """Return whether a slot was taken from a link, and it has taken no piece in time since."""
        return time.monotonic() - self._stalled.get(link, -STALLED_S) < STALLED_S

    def reserved(self, link: LinkId, holders: Collection[LinkId]) -> bool:
        """Return whether the last free slot is kept from a link, for another that takes its pieces at once and has no slot."""
        if link in self._prompt:
            return False
        since = time.monotonic() - PROMPT_S
        while self._prompt and next(iter(self._prompt.values())) < since:
            self._prompt.popitem(last=False)
        return any(other not in holders for other in self._prompt)

    def rank(self, link: LinkId) -> tuple[float, ...]:
        """Return where a link stands among those that wait: the least comes first.

        Links that have stalled come last. Else it counts how long slots were held by its host, then by its engine, then over it.
        """
        now = time.monotonic()
        return (self.stalled(link), *(self._used(name, now) for name in self._names(link)))

    def _names(self, link: LinkId) -> tuple[Hashable, ...]:
        levels = self._owners.get(link, NOBODY).levels
        return (*(levels[: level + 1] for level in range(len(levels))), link)

    def _used(self, name: Hashable, now: float) -> float:
        """Return for how many seconds slots were held; each second counts half after ``HALF_LIFE_S``."""
        seconds, at = self._spent.get(name, (0.0, 0.0))
        return float(seconds * 0.5 ** ((now - at) / HALF_LIFE_S))
