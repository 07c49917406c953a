"""What the garbage collector looks at while a clause about leaks counts."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["old_objects_aside"]


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """Have the collector look only at what is made from now on; for a ``with``, or as a decorator of a clause.

    What leaks is made while the clause runs. A process that has imported engines holds millions of older objects, and each
    collection among them takes longer than all that the clause does between two.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
