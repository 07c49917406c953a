"""How often to look at what does not report by itself: a fence, a library without a descriptor."""

from __future__ import annotations

__all__ = ["look_again"]

MIN_S, MAX_S = 0.00005, 0.0005
"""Bounds of the time between two looks: at 2,000 looks a second, waiting takes about a tenth of a core."""
SHARE = 32
"""The part of the time waited so far that passes until the next look, so that looking late delays little of what was waited for."""


def look_again(since: float, now: float) -> float:
    """Return when to look again at what is waited for since ``since``. All are seconds of one clock.

    What is over soon is seen at once, and what takes long costs little: an engine's forward pass takes milliseconds, and needs
    the processor.
    """
    return now + min(max(MIN_S, (now - since) / SHARE), MAX_S)
