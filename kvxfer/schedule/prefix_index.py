"""Find what an engine has computed by a chain that another engine sends."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, NamedTuple, TypeVar

from kvxfer import arguments
from kvxfer.schedule.chain import STEP, Chain, Prefix
from kvxfer.values import MAX_TOKENS

T = TypeVar("T")

EAGER = 256
"""How many prefixes behind a question are hashed as soon as they come."""
LISTED = 4
"""How often a token may be listed on average. Of more prompts that begin alike, the oldest is forgotten."""


class KnownPrefix(NamedTuple, Generic[T]):
    """What an engine has computed and a chain names."""

    name: T  # the engine's own name for the tokens of which these are the first
    tokens: int  # how many of the first tokens the two have in common


class PrefixIndex(Generic[T]):
    """The tokens that an engine has computed recently, by their chains. One thread.

    It says what has been computed, not what is still cached; that the engine looks up by its own name. Hashing takes 2 us for 16 tokens.
    Behind a question, the next ``EAGER`` prefixes are hashed as they come, so that the next question need not wait for it. Where nobody
    asks, nothing is hashed.

    Args:
        most: The most tokens that are remembered: as many as the cache has room for, say. Tokens that several have in common count once.

    Raises:
        ArgumentError: ``most`` is not a count.
    """

    def __init__(self, most: int) -> None:
        self._most = arguments.integer("most", most, 0, MAX_TOKENS) // STEP
        self._new: deque[tuple[Prefix, T]] = deque()  # what is not hashed yet
        self._steps = 0  # how many steps that has
        self._names: OrderedDict[int, tuple[list[bytes], T]] = OrderedDict()  # by serial number, the oldest first
        self._numbers = 0
        self._unasked = EAGER  # how many have come since the last question
        self._listed = 0  # links of all of these, those included that a later one has as well
        # The latest that has each link. Since it also has all links in front, those are forgotten no sooner: ``find`` relies on it.
        self._latest: dict[bytes, int] = {}

    def add(self, prefix: Prefix, name: T) -> None:
        """Record that all tokens of a prefix have been computed, or will be with steps that the workers have been given.

        The later of two that begin alike stands for what they have in common.
        """
        self._new.append((arguments.instance("prefix", prefix, Prefix), name))
        self._steps += len(prefix) // STEP
        while self._steps > self._most and len(self._new) > 1:
            self._steps -= len(self._new.popleft()[0]) // STEP
        self._unasked += 1
        if self._unasked <= EAGER:
            self._hash()

    def find(self, chain: Chain) -> KnownPrefix[T] | None:
        """Return what has the longest common part with a chain; None if nothing has any."""
        self._unasked = 0
        self._hash()
        links = arguments.instance("chain", chain, Chain)
        known, unknown = 0, len(links) + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if self._with(links, middle) is not None:
                known = middle
            else:
                unknown = middle
        if (found := self._with(links, known)) is None:
            return None
        own, name = found
        every = links.step // STEP
        # Of a chain that somebody has put together, an earlier link may be another one.
        for at in range(known):
            if own[(at + 1) * every - 1] != links.digest((at + 1) * links.step):
                known = at
                break
        return KnownPrefix(name, known * links.step) if known else None

    def _with(self, chain: Chain, at: int) -> tuple[list[bytes], T] | None:
        """Return the latest prefix that has the link of a chain that is its ``at``-th, after as many tokens as there."""
        link, place = chain.digest(at * chain.step), at * chain.step // STEP
        number = self._latest.get(link)
        if number is None:
            return None
        found = self._names[number]
        return found if len(found[0]) >= place and found[0][place - 1] == link else None

    def clear(self) -> None:
        """Forget everything, as when the cache is dropped."""
        self._new.clear()
        self._names.clear()
        self._latest.clear()
        self._steps = self._listed = 0

    def __len__(self) -> int:
        """Return how many tokens are remembered, in whole steps."""
        return (len(self._latest) + self._steps) * STEP

    def _hash(self) -> None:
        while self._new:
            prefix, name = self._new.popleft()
            links = list(prefix.links[: self._most])
            self._numbers += 1
            self._names[self._numbers] = links, name
            self._listed += len(links)
            self._latest.update(dict.fromkeys(links, self._numbers))
            while len(self._latest) > self._most or self._listed > LISTED * self._most:
                number, (old, _) = self._names.popitem(last=False)
                self._listed -= len(old)
                for link in old:
                    if self._latest.get(link) == number:
                        del self._latest[link]
        self._steps = 0
