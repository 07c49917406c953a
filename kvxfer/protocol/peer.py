"""The peer that a connection, a link or a message counts for when something is short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")


class PeerIdentity(msgspec.Struct, frozen=True):
    """A peer, from what is proved of it to what it only says of itself.

    Shares go to the key and the host together first, then within them to the engine. So a peer that claims many names takes them
    from its own share. ``shares.py`` does the same for amounts.
    """

    host: str = ""  # the address that it speaks from
    engine: str = ""  # the engine that it says it is; empty if it has not said so
    key: str = ""  # the short name of the key that it has proved to hold; empty if there are no keys

    @property
    def levels(self) -> tuple[Hashable, ...]:
        """What shares go to, the best proved first."""
        return ((self.key, self.host), self.engine)


NOBODY = PeerIdentity()
"""The peer that something counts for if that makes no difference."""


def largest_group(members: Iterable[T], peer: Callable[[T], PeerIdentity]) -> list[T]:
    """Return the members of the host with the most, and of those the ones of the engine with the most; their order is kept.

    Args:
        members: What is counted. It is not empty.
        peer: Returns the peer that a member counts for.
    """
    group = [(member, peer(member).levels) for member in members]
    for level in range(len(group[0][1])):
        counts = Counter(levels[level] for _, levels in group)
        ((most, _),) = counts.most_common(1)
        group = [(member, levels) for member, levels in group if levels[level] == most]
    return [member for member, _ in group]
