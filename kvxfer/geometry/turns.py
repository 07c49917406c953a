"""TokenTurns: which tokens a rank holds where ranks spread the tokens of a request among them (context parallelism).

The ranks take turns: each holds every ``count``-th run of ``span`` tokens, and keeps its own tokens one after the other. A block
table is the same for all of them, and one of its blocks stands for the tokens of all ranks, of which each rank's block holds its share.

Two ranks of two engines share the tokens that both hold. If both take tokens one by one, the ones that they share are equally
far apart, and count as one stretch. Otherwise each stretch is of tokens that follow each other.
"""

from __future__ import annotations

from math import gcd, lcm

import msgspec

from kvxfer import arguments
from kvxfer.values import MAX_TOKENS


class TokenTurns(msgspec.Struct, frozen=True):
    """This rank holds the tokens ``t`` with ``t // span % count == index``.

    Raises:
        ArgumentError: An argument has the wrong type or range.
    """

    index: int  # the place of this rank in the order of turns, from 0
    count: int  # how many ranks, or groups of ranks that hold the same, take turns
    span: int = 1  # tokens of a turn

    def __post_init__(self) -> None:
        count = arguments.integer("count", self.count, 1, MAX_TOKENS)
        for name, most, least in (("index", count - 1, 0), ("span", MAX_TOKENS, 1)):
            msgspec.structs.force_setattr(self, name, arguments.integer(name, getattr(self, name), least, most))
        msgspec.structs.force_setattr(self, "count", count)

    def before(self, token: int) -> int:
        """Return how many of the tokens before this one are held here."""
        rounds, rest = divmod(token, self.span * self.count)
        return rounds * self.span + min(max(rest - self.index * self.span, 0), self.span)


ALL = TokenTurns(0, 1)
"""The turns of a rank that holds all tokens."""


class Shared(msgspec.Struct, frozen=True):
    """The tokens that two ranks both hold."""

    src: TokenTurns = ALL
    dst: TokenTurns = ALL

    @property
    def step(self) -> int:
        """Tokens from one of a stretch to the next."""
        return lcm(self.src.count, self.dst.count) if self._single else 1

    @property
    def src_step(self) -> int:
        """How many of the producer's own tokens lie from one token of a stretch to the next."""
        return self.step // self.src.count if self._single else 1

    @property
    def dst_step(self) -> int:
        """How many of the consumer's own tokens lie from one token of a stretch to the next."""
        return self.step // self.dst.count if self._single else 1

    @property
    def share(self) -> float:
        """Their share of all tokens; 0 if there are none."""
        every = self._repeats
        # Tokens x and y of a turn of each are the same one, time and again, if they are so far apart modulo ``every``.
        apart = (self.dst.index * self.dst.span - self.src.index * self.src.span) % every
        (whole, rest), (other, more) = divmod(self.src.span, every), divmod(self.dst.span, every)
        both = every * whole * other + whole * more + rest * other
        both += max(0, min(rest, apart + more) - apart) + max(0, min(rest, apart + more - every))
        return both / lcm(self.src.span * self.src.count, self.dst.span * self.dst.count)

    @property
    def first(self) -> int:
        """The first of them, if they are equally far apart: ``step`` is above 1."""
        every = self._repeats
        src, dst = self.src.count // every, self.dst.count // every
        return self.src.index + self.src.count * ((self.dst.index - self.src.index) // every * pow(src, -1, dst) % dst)

    @property
    def _repeats(self) -> int:
        return gcd(self.src.span * self.src.count, self.dst.span * self.dst.count)

    @property
    def _single(self) -> bool:
        return self.src.span == self.dst.span == 1
