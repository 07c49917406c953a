"""Prints the progress of a long run to standard error, so that standard output has only the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["Say", "progress", "silent"]

Say = Callable[[str], None]


def progress() -> Say:
    """Return a function that prints a line after the seconds since now."""
    start = time.monotonic()
    return lambda what: print(f"{time.monotonic() - start:7.1f} s  {what}", file=sys.stderr, flush=True)


def silent(what: str) -> None:
    """Print nothing."""
