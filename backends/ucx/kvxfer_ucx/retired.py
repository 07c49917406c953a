"""Listeners of closed transports, kept until nobody can be dialling them any more.

UCX 1.20 accepts connections in a thread of its own and keeps a pointer to the listener with each until its first bytes
have come. Destroying the listener meanwhile lets that thread read, and write, freed memory: the process dies (seen
when a transport was closed while a peer was dialling it).
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

__all__ = ["retire"]

GRACE_S = 1.0
"""A peer that dials sends its first bytes at once; one that was told where to dial before we closed does so within this."""

_retired: dict[int, list[Any]] = {}
# One reference more, so that the end of the process leaves to the system what is still in here.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_retired))


def retire(*parts: Any) -> None:
    """Keep ``parts`` for ``GRACE_S``, then destroy them in this order, in a thread of their own. Any thread."""
    kept = list(parts)
    _retired[id(kept)] = kept
    timer = threading.Timer(GRACE_S, _destroy, [kept])
    timer.daemon = True
    timer.start()


def _destroy(parts: list[Any]) -> None:
    while parts:
        del parts[0]
    del _retired[id(parts)]
