"""Keep the garbage collector from scanning old objects while a clause counts leaks."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """Have the collector scan only objects made from now on; use it in a ``with``, or as the decorator of a clause.

    What leaks is made while the clause runs. A process that has imported engines holds millions of older objects, and each
    collection that scans them takes longer than everything that the clause does between two collections.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
