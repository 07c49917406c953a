"""Which peers UCX reads from by itself, without the help of the process that it reads from.

Over TCP that process answers the READ, and can go down inside UCX (seen with 1.23) when either side ends in the middle of it: a
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

__all__ = ["Reach"]

_CARDS = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Reach:
    """``host``: processes of this host are reached whose numbers mean the same here; ``network``: others are."""

    host: bool
    network: bool

    @classmethod
    def of(cls, options: Options, memory: Collection[str]) -> Reach:
        """For these kinds of memory; as the options say, or else the environment.

        Plugins other than UCX reach everywhere, and so do all where the user has named the verbs.
        """
        if options.plugin != "UCX" or options.verbs is not None:
            return cls(True, True)
        settings = options.ucx_settings
        cards = set(os.listdir(_CARDS)) if _CARDS.is_dir() else set()
        allowed = allowed_by(in_force(settings, "TLS"), GROUPS["all"])
        network = bool(allowed & NETWORK and allowed_by(in_force(settings, "NET_DEVICES"), cards))
        return cls(network or bool(allowed & (HOST if "cuda" in memory else {"cma"})), network)

    @property
    def words(self) -> str:
        """For a user."""
        if not self.host:
            return "none: UCX has nothing but TCP, over which only writes are safe"
        return "from any peer" if self.network else "from peers on this host; to others UCX has nothing but TCP here"

    def includes(self, here: bool) -> bool:
        """Whether it includes a process; ``here``: it is on this host, and the kernel has told its number."""
        return self.host if here else self.network
