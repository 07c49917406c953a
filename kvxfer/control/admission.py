"""Which hosts may connect: those of the allow-list, in which a name stands for the addresses that it resolves to.

Resolving blocks, so it is done elsewhere than judging. What was found counts for a bounded time.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from kvxfer.identity import Address, IdentityError, allowed, is_ip
from kvxfer.security import plain, portless

__all__ = ["Admission"]

RENEW_S = 30.0
"""Seconds after which a name is resolved again."""
RETRY_S = 2.0
"""Seconds after which a name is resolved again for an address that it has not led to."""
KEPT_S = 300.0
"""Seconds for which addresses count that a name has led to, if it cannot be resolved again. If it is gone, they end at once."""
_GONE = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


@dataclass
class _Name:
    """What is known of a name: the addresses that it led to at ``found``; ``tried`` is when it was last resolved."""

    addresses: frozenset[str] = frozenset()
    found: float = -KEPT_S
    tried: float = -KEPT_S


class Admission:
    """Judges hosts by the allow-list; ``None`` admits everybody. One thread judges and another may resolve meanwhile."""

    def __init__(self, peers: tuple[str, ...] | None) -> None:
        self._peers = None if peers is None else [portless(entry.strip()) for entry in peers]
        names = [entry for entry in self._peers or () if "/" not in entry and not is_ip(entry.strip("[]"))]
        self._names = {name: _Name() for name in names}

    def admits(self, host: str) -> bool | None:
        """Return whether a peer from this address may connect; ``None`` if names must be resolved first."""
        address = plain(host)
        try:
            if self._peers is None or allowed(Address(address, 1), self._peers):
                return True
        except IdentityError:
            return False
        now = time.monotonic()
        if any(address in name.addresses and now - name.found < KEPT_S for name in self._names.values()):
            return True
        return None if any(now - name.tried >= RETRY_S for name in self._names.values()) else False

    @property
    def old(self) -> bool:
        """Whether names should be resolved again, though what is known of them still counts."""
        now = time.monotonic()
        return any(now - name.tried >= RENEW_S for name in self._names.values())

    def resolve(self) -> None:
        """Resolve the names again; this may block."""
        for text, name in self._names.items():
            if time.monotonic() - name.tried < RETRY_S:
                continue
            try:
                found = socket.getaddrinfo(text, None, type=socket.SOCK_STREAM)
            except OSError as e:
                if e.errno in _GONE:
                    name.addresses = frozenset()
            else:
                name.addresses, name.found = frozenset(plain(str(where[0])) for *_, where in found), time.monotonic()
            name.tried = time.monotonic()
