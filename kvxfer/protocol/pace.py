"""Estimate how fast a link moves bytes, to decide whether bands of layers pay off over it."""

from __future__ import annotations

import math
from collections import deque

import msgspec

MIN_BYTES = 1 << 20
"""The fewest bytes that tell how fast a link is; with fewer, most of the time is spent elsewhere."""
REMEMBERED = 8
"""The number of spells by which a link is judged."""
LONG = 16
"""The parts after which a spell ends even if something is still in flight. Each straddling part adds as many more. So what is in
flight at its borders is little compared with what it counts."""
PAYS_S = 0.02
"""The fewest seconds that all bytes of a transfer must take on the wire for bands to pay off. Bands hide up to seven eighths of that,
and cost both sides seven more parts."""


class _Spell(msgspec.Struct, gc=False):
    """A time in which something was always in flight."""

    began: float
    ended: float
    nbytes: int  # of the parts that began and ended in it
    parts: int  # the number of these
    straddling: int  # parts that ended in it but had begun before


class LinkPace:
    """The pace of one link, in one direction: bytes over the time in which anything was in flight.

    Parts that overlap share the link, so no single one tells how fast it is. They may end in any order: the time in which
    any part was in flight is put together from those that have ended. What has not ended does not count yet, so a busy link
    may look slower than it is, but never faster.

    Attributes:
        bytes_per_s: The speed of its fastest spell, because in others something may have waited; 0 before anything is known.
    """

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        self._spells: deque[_Spell] = deque(maxlen=REMEMBERED)
        self._before = -math.inf  # when the last long spell ended; nothing is added to it or to earlier ones

    def took(self, nbytes: int, seconds: float, now: float) -> None:
        """Record that a part of ``nbytes`` has come and took ``seconds``; the clock is the same in all calls."""
        began = now - seconds
        straddles = began < self._before
        spell = _Spell(self._before, now, 0, 0, 1) if straddles else _Spell(began, now, nbytes, 1, 0)
        spells = self._spells
        while spells and spells[-1].ended > spell.began:
            last = spells.pop()
            spell.began = min(spell.began, last.began)
            spell.nbytes, spell.parts = spell.nbytes + last.nbytes, spell.parts + last.parts
            spell.straddling += last.straddling
        if spells and spells[-1].nbytes < MIN_BYTES:
            spells.pop()  # it tells nothing, and must not displace one that does
        spells.append(spell)
        if spell.parts >= LONG * (1 + spell.straddling):
            self._before = now

        fastest = 0.0
        for each in spells:
            if each.nbytes >= MIN_BYTES and each.ended > each.began:
                pace = each.nbytes / (each.ended - each.began)
                fastest = pace if pace > fastest else fastest
        self.bytes_per_s = fastest

    def slow(self, nbytes: float) -> bool:
        """Return whether ``nbytes`` would take long enough for bands to pay off; false before anything is known."""
        return self.bytes_per_s > 0 and nbytes >= PAYS_S * self.bytes_per_s
