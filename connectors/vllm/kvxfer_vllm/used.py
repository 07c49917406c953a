"""Offers that this engine has had: each can be loaded once, and a later request that names it would ask in vain.

A front end may call its engine several times under the params of one answer: after a tool, say, or for a retry.
"""

from __future__ import annotations

__all__ = ["UsedOffers"]

MOST = 1 << 16
"""The most that are remembered; the oldest are forgotten first."""


class UsedOffers:
    """Their keys (``params.offer_key``). One thread."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def add(self, key: bytes) -> None:
        """Remember one."""
        if len(self._keys) >= MOST:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = None

    def __contains__(self, key: bytes | None) -> bool:
        """Return whether this engine has had it."""
        return key in self._keys
