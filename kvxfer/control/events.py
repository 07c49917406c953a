"""What has happened, for an engine to take when it likes: by polling, waiting, descriptor or asyncio."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, runtime_checkable

from kvxfer import arguments
from kvxfer.protocol.values import Event

__all__ = ["EventQueue", "Readable", "readable"]

_LONGEST_S = 3600.0


@runtime_checkable
class Readable(Protocol):
    """What has a descriptor that polls readable while there is something to take."""

    def fileno(self) -> int:
        """Return the descriptor, which is not the caller's to read or to close."""


class EventQueue:
    """Events in their order. Any thread may take them, and each is taken once; one thread at a time adds events and tells.

    ``heard`` is called by ``tell`` where there is a new event; it must not block.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self.heard: Callable[[], None] | None = None
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._new = False  # there is an event of which nobody has been told
        self._told = False  # the descriptor is readable, or will be at once, or whoever has read it has not looked yet
        self._over = False
        weakref.finalize(self, os.close, self._fd)  # not before: events may be taken, and come late, after the end

    def put(self, event: Event) -> None:
        """Add an event. ``tell`` has to follow."""
        self._events.append(event)
        self._new = True

    def tell(self) -> None:
        """Wake whoever waits for events, once for all that have been added: each time costs two threads a turn."""
        new, self._new = self._new, False
        if not new or not self._events:  # who looks by himself has them
            return
        if not self._told:  # once is enough for all that is not taken
            self._told = True
            os.eventfd_write(self._fd, 1)
        heard = self.heard
        if heard is not None:
            heard()

    def end(self) -> None:
        """Say that hardly anything will come any more: nobody waits from now on, and the descriptor stays readable."""
        self._over = True
        os.eventfd_write(self._fd, 1)

    def take(self, timeout: float) -> list[Event]:
        """Return what there is. If that is nothing, wait up to so many seconds for something, unless all is over."""
        out = self._taken()
        until = time.monotonic() + min(timeout, _LONGEST_S)
        while not out and not self._over and (left := until - time.monotonic()) > 0:
            poll = select.poll()
            poll.register(self._fd, select.POLLIN)
            poll.poll(left * 1e3)
            out = self._taken()
        return out

    def fileno(self) -> int:
        """Return a descriptor that polls readable while there is something to take, and for good after the end."""
        return self._fd

    def _taken(self) -> list[Event]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._told = False  # before it is looked at what there is, so that what comes after that is announced anew
        if self._over:
            os.eventfd_write(self._fd, 1)
        out: list[Event] = []
        while True:
            try:
                out.append(self._events.popleft())
            except IndexError:
                return out


async def readable(source: Readable, timeout: float) -> bool:
    """Wait in asyncio until there is something to take.

    Any number of tasks may wait for one source; it costs nothing while nothing comes. Rarely, another has taken what woke
    the caller.

    Args:
        source: an ``Agent``, a ``WorkerSide``, or whatever else has such a descriptor.
        timeout: seconds to wait at the most.

    Returns:
        Whether there is something; false after ``timeout`` seconds.

    Raises:
        ArgumentError: an argument is of the wrong type.
    """
    import asyncio  # nobody else needs it

    arguments.instance("source", source, Readable)  # type: ignore[type-abstract]
    timeout = arguments.seconds("timeout", timeout)
    fd = os.dup(source.fileno())  # a loop knows one reader of a descriptor
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    try:
        loop.add_reader(fd, ready.set)
        async with asyncio.timeout(timeout):
            return await ready.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)
