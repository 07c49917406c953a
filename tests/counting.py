"""What something costs, counted in calls of functions: the same on every machine, however busy it is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType

__all__ = ["calls"]


def calls(do: Callable[[], object]) -> int:
    """Return how many functions are called, of Python's and of C's, while this thread does something."""
    count = 0

    def hook(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()  # when it runs, and what it calls then, is no part of it
    sys.setprofile(hook)
    try:
        do()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count
