"""How a long run tells what it is at: on the standard error, so that what a script reads is nothing but the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["Say", "progress", "silent"]

Say = Callable[[str], None]


def progress() -> Say:
    """Return what prints a line, behind the seconds since now."""
    start = time.monotonic()
    return lambda what: print(f"{time.monotonic() - start:7.1f} s  {what}", file=sys.stderr, flush=True)


def silent(what: str) -> None:
    """Say nothing of it."""
