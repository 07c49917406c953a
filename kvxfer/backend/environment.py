"""Change the environment of the process only while a library reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["environment"]

_changing = threading.RLock()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables within the ``with`` block, and restore them after. Any thread; others wait meanwhile."""
    with _changing:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
