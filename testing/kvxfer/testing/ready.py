"""Wait for descriptors, without the limit of ``select.select`` to 1023, because some back ends open a dozen each."""

from __future__ import annotations

import select
from collections.abc import Iterable


def ready(descriptors: Iterable[int], timeout: float) -> set[int]:
    """Return those of ``descriptors`` that are readable (or broken) within ``timeout`` seconds. Any thread."""
    poll = select.poll()
    for fd in descriptors:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(max(timeout, 0) * 1000)}
