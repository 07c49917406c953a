"""Prints the progress of a long run to standard error, so that standard output has only the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from kvxfer.cli.terminal import verbatim

Say = Callable[[str], None]


def progress() -> Say:
    """Return a function that prints a line after the seconds since now."""
    start = time.monotonic()
    return lambda what: print(f"{time.monotonic() - start:7.1f} s  {what}", file=sys.stderr, flush=True)


@contextmanager
def status() -> Iterator[Say]:
    """Yield a function that shows on a terminal what is being waited for, until the block ends; elsewhere it shows nothing."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    with console.status("") as shown:
        yield lambda what: shown.update(verbatim(what))


def silent(what: str) -> None:
    """Print nothing."""
