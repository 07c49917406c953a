"""Which peers UCX reads from by itself, without the help of the process that it reads from.

Over TCP that process answers the READ, and can go down inside UCX (seen with 1.23) when either side ends in the middle of it. A
reader that is killed takes the one that it reads from along, and one that closes while it is read crashes. Writes do no such
harm. NIXL does not say what UCX has chosen for a link, so this is what it can choose at all.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from kvxfer_nixl.carriers import GROUPS, HOST, NETWORK, allowed_by, in_force
from kvxfer_nixl.options import Options

_CARDS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Reach:
    """Who is reached."""

    host: bool  # whether processes of this host are, by shared memory
    network: bool  # whether others are

    @classmethod
    def of(cls, options: Options, memory: Collection[str]) -> Reach:
        """For these kinds of memory; as the options say, or else the environment.

        Plugins other than UCX reach everywhere, and so do all where the user has named the verbs.
        """
        if options.plugin != "UCX" or options.verbs is not None:
            return cls(True, True)
        contexts = options.contexts
        cards = set(os.listdir(_CARDS)) if _CARDS.is_dir() else set()
        host, network = (
            set[str]() if settings is None else allowed_by(in_force(settings, "TLS"), GROUPS["all"])
            for settings in (contexts.host, contexts.network)
        )
        devices = "" if contexts.network is None else in_force(contexts.network, "NET_DEVICES")
        return cls(
            bool(host & (HOST if "cuda" in memory else {"cma"})), bool(network & NETWORK and allowed_by(devices, cards))
        )

    @property
    def somebody(self) -> bool:
        """Whether there can be a peer that UCX reads from by itself."""
        return self.host or self.network

    @property
    def words(self) -> str:
        """For a user."""
        if not self.somebody:
            return "none: UCX has nothing but TCP, over which only writes are safe"
        return "from any peer" if self.network else "from peers on this host; to others UCX has nothing but TCP here"

    def includes(self, here: bool) -> bool:
        """Whether it includes a process, which is reached by shared memory (``here``) or by a network."""
        return self.host if here else self.network
