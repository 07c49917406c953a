"""Ports for what must be told one before it listens."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

__all__ = ["NOBODY", "free_ports"]

NOBODY = 1
"""A port where nobody listens. One that was free a moment ago may be somebody's by now: another test's, at the same time."""


def free_ports(count: int) -> int:
    """Return the first of so many ports in a row that are free.

    They are below those that the system hands out by itself, and taken at random: another test that runs at the same time looks
    for some, too, and would find the same.
    """
    anywhere = random.SystemRandom()
    for _ in range(1000):
        first = anywhere.randrange(20_000, 32_000)
        with ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
        return first
    raise AssertionError("no ports are free")
