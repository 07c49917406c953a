"""How consumers have used a producer's slots lately: who comes next, who may have many, and how long each may hold one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from kvxfer import clock
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.values import LinkId

AT_ONCE_S, IN_TIME_S = 0.2, 1.0
"""A link that holds a slot for less has taken its piece at once, or at least in time. A piece takes milliseconds."""
HALF_LIFE_S = 1.0
"""The time after which past holding of a slot counts half."""
PROMPT_S, STALLED_S = 10.0, 30.0
"""How long it is remembered that a link has taken a piece at once, and that a slot was taken from it."""
FORGIVEN = 4
"""After its first loss of a slot, a link has to take one piece in time. Each further loss multiplies that number by this factor."""
LOSS_FACTOR = 10
"""After each loss, a link may hold a slot for this many times as long as a new one."""


@dataclass(slots=True)
class _Record:
    """How a link has used slots."""

    names: tuple[Hashable, ...] = ()  # what it counts for, from its host to its engine; empty if that is unknown
    earned: int = 0  # the pieces that it has taken at once since it last lost a slot
    lost_at: float = -STALLED_S  # when it last lost a slot
    losses: int = 0
    owed: int = 0  # the pieces that it has to take in time until that is forgiven
    next_owed: int = 1  # how many it has to take after the next loss


UNUSED = _Record()
"""How a link has used slots of which nothing is known."""


class SlotUsage:
    """The use of slots by each link, and by the peers that they count for. Used by the data thread only."""

    def __init__(self) -> None:
        self._records: dict[LinkId, _Record] = {}
        self._spent: dict[Hashable, tuple[float, float]] = {}  # seconds that slots were held, and as of when
        self._prompt: OrderedDict[LinkId, float] = OrderedDict()  # when it last took a piece at once
        self._lost_at = -STALLED_S  # when a link last lost a slot

    def know(self, link: LinkId, owner: PeerIdentity) -> None:
        """Record the host and the engine that a link counts for."""
        levels = owner.levels
        self._records[link] = _Record(tuple(levels[: level + 1] for level in range(len(levels))))

    def forget(self, link: LinkId) -> None:
        """Forget a link that is closed. What its peer has used still counts."""
        self._records.pop(link, None)
        self._prompt.pop(link, None)

    def held(self, link: LinkId, seconds: float) -> None:
        """Record that a link has given back a slot, and how long it held it."""
        now, record = clock.now(), self._records.get(link)
        if link not in self._spent:  # what is left of others is forgotten then, not for each slot
            self._spent = {name: used for name, used in self._spent.items() if now - used[1] < 20 * HALF_LIFE_S}
        for name in self._names(link):
            self._spent[name] = self._used(name, now) + seconds, now
        if record is None or now - record.lost_at < seconds:
            return  # it is closed, or the slot was taken from it
        if seconds < IN_TIME_S and record.owed:
            record.owed -= 1
            record.losses *= record.owed > 0
        if seconds < AT_ONCE_S:
            record.earned += 1
            self._prompt.pop(link, None)
            self._prompt[link] = now

    def lose(self, link: LinkId) -> None:
        """Record that a link, which took nothing, has to give up a slot."""
        record = self._records.setdefault(link, _Record())
        record.lost_at = self._lost_at = clock.now()
        record.earned, record.losses = 0, record.losses + 1
        record.owed, record.next_owed = record.next_owed, record.next_owed * FORGIVEN
        self._prompt.pop(link, None)

    def losses(self, link: LinkId) -> int:
        """Return how often a link has lost a slot that is not forgiven."""
        return self._records.get(link, UNUSED).losses if self.stalled(link) else 0

    def stalled(self, link: LinkId) -> bool:
        """Return whether a link has lost a slot, and has not taken enough pieces in time since."""
        record = self._records.get(link, UNUSED)
        return record.losses > 0 and clock.now() - record.lost_at < STALLED_S

    def patience(self, link: LinkId, calm: float, first: float) -> float:
        """Return for how many seconds a link may hold a slot for which others wait.

        ``calm``, unless links have lost slots lately. Then a new link may hold one for ``first`` seconds, and for as many more
        for each piece that it takes at once, up to half of ``calm``. After a loss it has more time than a new one.
        """
        if not self._alert:
            return calm
        return min(first * (1 + self._records.get(link, UNUSED).earned + LOSS_FACTOR * self.losses(link)), calm / 2)

    @property
    def _alert(self) -> bool:
        """Whether a link has lost a slot lately."""
        return clock.now() - self._lost_at < STALLED_S

    def reserved(self, link: LinkId, holders: Collection[LinkId]) -> bool:
        """Return whether the last free slot is kept from a link, for another kind of link.

        It is kept from a new one for another that takes its pieces at once and has no slot. Once links have lost slots, one is
        kept for each of these two kinds.
        """
        if link in self._prompt:
            return False
        since = clock.now() - PROMPT_S
        while self._prompt and next(iter(self._prompt.values())) < since:
            self._prompt.popitem(last=False)
        if self._alert and all(other in self._prompt or self.stalled(other) for other in holders):
            return False
        return any(other not in holders for other in self._prompt)

    def rank(self, link: LinkId) -> tuple[float, ...]:
        """Return where a link stands among those that wait: the least comes first.

        Links that have lost slots come last. Else it counts how long slots were held by its host, then by its engine, then over it.
        """
        now = clock.now()
        return (self.losses(link), *(self._used(name, now) for name in self._names(link)))

    def _names(self, link: LinkId) -> tuple[Hashable, ...]:
        return *self._records.get(link, UNUSED).names, link

    def _used(self, name: Hashable, now: float) -> float:
        """Return for how many seconds slots were held; each second counts half after ``HALF_LIFE_S``."""
        seconds, at = self._spent.get(name, (0.0, 0.0))
        return float(seconds * 0.5 ** ((now - at) / HALF_LIFE_S))
