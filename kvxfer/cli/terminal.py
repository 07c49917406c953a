"""What commands print for people."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape

from kvxfer.failures import Failure
from kvxfer.text import escaped

PIPED_WIDTH = 1000
"""Columns of output that goes to a file or a pipe, where a wrapped line would hide its end from `grep`."""


def make_console(**options: Any) -> Console:
    """Make a console as wide as its terminal. Without a terminal, it wraps no line, unless ``COLUMNS`` says how wide it is."""
    console = Console(highlight=False, **options)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_WIDTH
    return console


def verbatim(text: object) -> str:
    """Return a text for rich to print as it is: it may come from a peer, and neither controls the terminal nor is markup."""
    return escape(escaped(str(text)))


def failed_at(peer: object, failure: Failure) -> str:
    """Return what is told of the failure of a question to a peer, with its advice."""
    return f"{peer}: {replace(failure, peer='')}"


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
