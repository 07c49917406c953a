"""Listeners of closed transports, kept until nobody can be dialling them any more.

UCX 1.20 accepts connections in a thread of its own. Destroying a listener while somebody is dialling it goes wrong in two
ways, both seen: a connection of which the first bytes have not come points to the listener, and that thread reads freed
memory when they do; and one that the worker has not looked at is never closed, and keeps that thread spinning.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

__all__ = ["destroy", "retire"]

GRACE_TURNS, PAUSE_S = 100, 0.01
"""A peer that dials sends its first bytes at once; one that was told where to dial before we closed does so within this: a second.
Counted in turns, so that a host that stands still for a while, peer and all, does not use it up."""

_retired: dict[int, list[Any]] = {}
# One reference more, so that the end of the process leaves to the system what is still in here.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_retired))


def destroy(held: list[Any]) -> None:
    """Let go of each in turn, the first first."""
    while held:
        del held[0]


def retire(held: list[Any], late: list[Any]) -> None:
    """Turn away who dials for ``GRACE_TURNS``, then ``destroy`` what is ``held``, in a thread of its own: a listener, its
    worker, the worker's context. Any thread, once nothing else uses them. ``late``: the listener's callback puts the endpoints
    of those who dial here."""
    _retired[id(held)] = held
    threading.Thread(target=_linger, args=(held, late), name="kvxfer-ucx-retired", daemon=True).start()


def _linger(held: list[Any], late: list[Any]) -> None:
    for _ in range(GRACE_TURNS):
        until = time.monotonic() + PAUSE_S
        while held[1].progress_once() and time.monotonic() < until:
            pass
        while late:
            late.pop().close_blocking()
        time.sleep(PAUSE_S)
    del _retired[id(held)]
    destroy(held)
