"""What a descriptor, a piece and a byte cost on a link, learned from its transfers; and the way of a part that costs least.

A part goes *straight*, with a descriptor for each of its rows, or *staged*, in one packed piece or in several. Its seconds are a sum
(``LinkCost.seconds``). The terms are those, none of them negative, that fit best to what parts of each size have taken: their least
squares, relative to each time. What a link never does keeps its first guess. docs/performance.md explains it for users.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

LEAST = 1 << 20
"""Parts of at most this many bytes are not measured, and go by the first guess: most of their time is spent elsewhere."""
PAYS = 0.9
"""Another way than the first guess's is taken if it should take at most this share of the time."""
KNOWN, ALIKE = 4, 8
"""A time counts as known once this number of parts of a way have been measured that were at most this number of times longer or shorter.
One before them, which makes connections, teaches nothing."""
TRIED, TRIED_AGAIN = 1 / 50, 1 / 200
"""The share of the time of all parts that may be lost with trials of other ways: while one of them is not known, and later."""
TRIAL_S = 0.05
"""The most seconds that a part may lose by a trial, as far as is known."""
EVERY = 16
"""The fewest measured parts between two trials of a way that is known."""
GAIN, ODD = 1 / 16, 4.0
"""The weight of one more part among those of its size, and how much faster than these it may count as. One that was held up weighs
little by itself."""
SELDOM = 4
"""Where parts have one way only, so that nothing is chosen by their costs, these are fitted once in this number of parts."""
NOTED = 64
"""The most parts of which something may wait to be learned; of more, the last ones count."""
SIZES = 32
"""The most sizes of parts, each twice to four times as long as the next, of which something is kept."""
TRUST = 1e-3
"""The weight of the first guesses against that of a size of parts."""
SWEEPS = 4
"""How often each term is fitted again after a part; the next part goes on from there."""

PART_S, PIECE_S = 100e-6, 200e-6
HOST_BYTE_S, DEVICE_BYTE_S = 250e-12, 2.5e-12
"""First guesses: 4 GB/s for host memory, 400 GB/s for a device's."""

PART, DESCRIPTOR, PIECE, BYTE, ALONE, AMONG = range(6)

Cost = Annotated[float, Meta(ge=0.0, le=1e6)]


class PartWay(NamedTuple):
    """A way for a part."""

    rows: int  # the rows of the part, each of which needs a descriptor if it goes straight
    nbytes: int  # the bytes of the part
    piece_bytes: int = 0  # the most bytes of a staged piece; 0 if it goes straight

    @property
    def pieces(self) -> int:
        """The number of pieces; 0 if it goes straight."""
        return -(-self.nbytes // self.piece_bytes) if self.piece_bytes else 0

    @property
    def sort(self) -> int:
        """0 if it goes straight, 1 if it is staged in one piece, 2 in several."""
        return min(self.pieces, 2)

    def counts(self) -> tuple[tuple[int, float], ...]:
        """Return how many of which terms its time is made of."""
        pieces = self.pieces
        if not pieces:
            return (PART, 1), (DESCRIPTOR, self.rows), (BYTE, self.nbytes)
        packed = ALONE if pieces == 1 else AMONG
        return (PART, 1), (PIECE, pieces), (BYTE, self.nbytes), (packed, self.nbytes)


class LinkCost(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """What things cost on a link, in seconds; ``None``: not known yet."""

    part: Cost  # a part
    descriptor: Cost | None  # each row of a part that goes straight
    piece: Cost  # each packed piece
    byte: Cost  # each byte, packed or not
    alone: Cost | None  # what packing adds for each byte of a part that is one piece, so that nothing overlaps
    among: Cost | None  # what packing adds for each byte of a part of several pieces

    def seconds(self, way: PartWay) -> float:
        """Return how long a part should take by a way; ``inf`` if that is not known."""
        pieces = way.pieces
        base = self.part + self.byte * way.nbytes
        if not pieces:
            return math.inf if self.descriptor is None else base + self.descriptor * way.rows
        packed = self.alone if pieces == 1 else self.among
        return math.inf if packed is None else base + self.piece * pieces + packed * way.nbytes


TRIALS = (
    LinkCost(0.0, 0.0, 1.0, 0.0, 1.0, 1.0),
    LinkCost(0.0, 1.0, 0.0, 0.0, 0.0, 1.0),
    LinkCost(0.0, 1.0, 0.0, 0.0, 1.0, 0.0),
)
"""Costs with which a way is the cheapest by far, by its ``PartWay.sort``: who tells a peer that these are its costs has it try the way."""


def guess(run_bytes: int, host: bool) -> LinkCost:
    """Return what things may cost where packing ``run_bytes`` costs as much as a descriptor."""
    byte = HOST_BYTE_S if host else DEVICE_BYTE_S
    return LinkCost(PART_S, run_bytes * byte, PIECE_S, byte, byte, byte)


def cheapest(ways: Sequence[PartWay], cost: LinkCost | None) -> PartWay:
    """Return the way to take. ``ways`` begins with the one that is taken while the others are not known to pay.

    Longer rows never make a part go staged that would go straight: they only make going straight cheaper.
    """
    first = ways[0]
    if cost is None or len(ways) == 1:
        return first
    limit, best = PAYS * cost.seconds(first), first
    if limit < math.inf:  # else nothing can be compared with it
        for way in ways[1:]:
            seconds = cost.seconds(way)
            if seconds < limit:
                limit, best = seconds, way
    return best


class _Size:
    """The measured parts of one way and about one size.

    Attributes:
        nbytes: Bytes of the last one.
        count: How many there were.
        rates: How many of each term they had in a second, on average. So one that was held up weighs little.
    """

    __slots__ = ("count", "nbytes", "rates")

    def __init__(self) -> None:
        self.nbytes, self.count, self.rates = 0, 0, np.zeros(6)

    def add(self, way: PartWay, seconds: float) -> None:
        rates = np.zeros(6)
        for term, count in way.counts():
            rates[term] = count / seconds
        if self.count >= KNOWN and rates[BYTE] > ODD * self.rates[BYTE]:
            rates *= ODD * self.rates[BYTE] / rates[BYTE]
        self.nbytes, self.count = way.nbytes, self.count + 1
        self.rates += (rates - self.rates) * max(1 / self.count, GAIN)


class WayCosts:
    """What the ways cost on one link, as far as its transfers have told.

    Attributes:
        row: Bytes of a row of the last measured part, on average.

    Args:
        first: The first guess.
        choices: Returns the ways of a part with this number of rows and of bytes; the first is that of the first guess.
    """

    def __init__(self, first: LinkCost, choices: Callable[[int, int], Sequence[PartWay]]) -> None:
        self.row = 1.0
        self._choices = choices
        self._noted: deque[tuple[PartWay, float]] = deque(maxlen=NOTED)  # parts of which nothing has been learned yet
        self._guess = np.array(msgspec.structs.astuple(first))
        self._terms: list[float] = self._guess.tolist()
        self._sizes: dict[tuple[int, int, int], _Size] = {}  # the last one seen last
        self._count = 0  # of all measured parts
        self._seen = [0, 0, 0]  # the measured parts that went each way
        self._tried = [0, 0, 0]  # the count when each way was last tried
        self._credit = [0.0, 0.0, 0.0]  # seconds that may be lost with trials of each way

    def known(self, ways: Sequence[PartWay] | None = None) -> LinkCost:
        """Return what is known, as far as it tells how long these ways take; ``None``: of parts of any size. Any thread."""
        part, descriptor, piece, byte, alone, among = self._terms
        if ways is None:
            sure = {sort for sort, count in enumerate(self._seen) if count > KNOWN}
        else:
            sure = {way.sort for way in ways if self._sure(way)}
        return LinkCost(
            part,
            descriptor if 0 in sure else None,
            piece,
            byte,
            alone if 1 in sure else None,
            among if 2 in sure else None,
        )

    def _sure(self, way: PartWay) -> bool:
        sort, alike = way.sort, 0
        for (other, _, _), size in self._sizes.items():
            if other == sort and way.nbytes <= ALIKE * size.nbytes and size.nbytes <= ALIKE * way.nbytes:
                alike += size.count
        return alike >= KNOWN

    def took(self, way: PartWay, seconds: float) -> None:
        """Record by which way a part went and how long it took, less what others had of that time.

        That is all that is done before its end is known to the engine; see ``learn``.
        """
        if seconds > 0.0 and way.rows:
            self.row = way.nbytes / way.rows
            self._noted.append((way, seconds))

    def learn(self) -> None:
        """Learn from the parts that were recorded. ``ask`` does it as well; it takes some 0.1 ms."""
        while self._noted:
            self._measured(*self._noted.popleft())

    def _measured(self, way: PartWay, seconds: float) -> None:
        ways = self._choices(way.rows, way.nbytes)
        self._count += 1
        sort = way.sort
        known = self.known(ways)
        if sort == cheapest(ways, known).sort:
            share = TRIED_AGAIN if max(map(known.seconds, ways)) < math.inf else TRIED
            earned = share / 2 * min(seconds, 2 * self._seconds(way))
            self._credit = [min(credit + earned, TRIAL_S) for credit in self._credit]
        else:
            usual = min(map(self._seconds, ways))
            due = max(2 * (self._seconds(way) - usual), usual)  # more than that was not for the way
            self._credit[sort] -= min(max(seconds - usual, 0.0), due, TRIAL_S)
        if self._seen[sort]:
            self._keep(way, seconds)
            if len(ways) > 1 or self._count % SELDOM == 0:
                self._fit()
        self._seen[sort] += 1

    def _keep(self, way: PartWay, seconds: float) -> None:
        sort = way.sort
        key = sort, way.nbytes.bit_length() // 2, 0 if sort else way.rows.bit_length() // 2
        size = self._sizes[key] = self._sizes.pop(key) if key in self._sizes else _Size()
        size.add(way, seconds)
        if len(self._sizes) > SIZES:
            del self._sizes[next(iter(self._sizes))]

    def _fit(self) -> None:
        """Bring each term to where the squares of all relative errors are least, while the others stay as they are."""
        rates = np.array([size.rates for size in self._sizes.values()]) * self._guess
        matrix, vector = (rates.T @ rates).tolist(), rates.sum(axis=0).tolist()
        terms = (self._terms / self._guess).tolist()
        for _ in range(SWEEPS):
            for i, row in enumerate(matrix):
                trust = TRUST / max(terms[i], 1.0) ** 2
                rest = sum([a * b for a, b in zip(row, terms, strict=True)]) - row[i] * terms[i]
                terms[i] = max((vector[i] + trust - rest) / (row[i] + trust), 0.0)
        self._terms = (terms * self._guess).tolist()

    def ask(self, rows: int, nbytes: int) -> LinkCost | None:
        """Return the costs by which the way of the next part is to be chosen; ``None`` if the first guess stands.

        Now and then these have another way tried than the cheapest. A trial has to wait until what it should lose is a small share of the
        time of all parts since the last one.
        """
        ways = self._choices(rows, nbytes)
        if len(ways) == 1:
            return None
        self.learn()
        known = self.known(ways)
        chosen = cheapest(ways, known)
        trial = self._trial(ways, chosen)
        if trial is not None:
            self._tried[trial.sort] = self._count
            return TRIALS[trial.sort]
        return None if chosen is ways[0] else known

    def _trial(self, ways: Sequence[PartWay], chosen: PartWay) -> PartWay | None:
        """Return another way to be tried now, if one has been waiting for long enough and has the credit for it."""
        usual = self._seconds(chosen)
        for way in ways:
            sort = way.sort
            if way is chosen or self._credit[sort] <= 0.0:
                continue
            wait = EVERY if self._sure(way) else KNOWN
            if self._count - self._tried[sort] >= wait and self._seconds(way) - usual <= self._credit[sort]:
                return way
        return None

    def _seconds(self, way: PartWay) -> float:
        return sum([count * self._terms[term] for term, count in way.counts()])
