"""Find what an engine has computed by a chain that another engine sends."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, NamedTuple, TypeVar

from kvxfer.schedule.chain import STEP, Chain, Prefix

__all__ = ["Found", "PrefixIndex"]

T = TypeVar("T")


class Found(NamedTuple, Generic[T]):
    """What an engine has computed and a chain names.

    Attributes:
        name: The engine's own name for the tokens of which these are the first.
        tokens: How many of the first tokens the two have in common.
    """

    name: T
    tokens: int


class PrefixIndex(Generic[T]):
    """The tokens that an engine has computed recently, by their chains. One thread.

    It says what has been computed, not what is still cached; that the engine looks up by its own name. Nothing is hashed before
    ``find`` is called for the first time, so an engine that nobody asks spends no time on it.

    Args:
        most: The most tokens that are remembered: as many as the cache has room for, say. Tokens that several have in common count once.
    """

    def __init__(self, most: int) -> None:
        raise NotImplementedError

    def add(self, prefix: Prefix, name: T) -> None:
        """Record that all tokens of a prefix have been computed, or will be with steps that the workers have been given.

        The later of two that begin alike stands for what they have in common.
        """
        raise NotImplementedError

    def find(self, chain: Chain) -> Found[T] | None:
        """Return what has the longest common part with a chain; None if nothing has any."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forget everything, as when the cache is dropped."""
        raise NotImplementedError

    def __len__(self) -> int:
        """Return how many tokens are remembered, in whole steps."""
        raise NotImplementedError
