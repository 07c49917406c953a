"""A queue of events, which an engine takes when it likes: by polling, waiting, a descriptor or asyncio."""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from kvxfer import arguments, clock
from kvxfer.flag import Flag
from kvxfer.protocol.values import Event

_MAX_WAIT_S = 3600.0


@runtime_checkable
class Readable(Protocol):
    """An object with a descriptor that polls readable while there is something to take."""

    def fileno(self) -> int:
        """Return the descriptor, which the caller must neither read nor close."""


class EventQueue:
    """Events in order. Any thread may take them, and each is taken once; only one thread at a time may call ``put`` and ``tell``.

    ``tell`` calls ``heard`` if there is a new event; it must not block.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self.heard: Callable[[], None] | None = None
        self._flag = Flag()  # never closed earlier: events may come, and be taken, after the end
        self._new = False  # an event was put since the last ``tell``
        # the descriptor is readable, about to be, or was read by a thread that has yet to take events
        self._told = False
        self._over = False

    def put(self, event: Event) -> None:
        """Add an event. Call ``tell`` afterwards."""
        self._events.append(event)
        self._new = True

    def tell(self) -> None:
        """Wake the threads that wait for events, once for all that were added, because each wake-up costs two threads a turn."""
        new, self._new = self._new, False
        if not new or not self._events:  # they have been taken already
            return
        if not self._told:  # once is enough until events are taken
            self._told = True
            self._flag.set()
        heard = self.heard
        if heard is not None:
            heard()

    def end(self) -> None:
        """Mark the end: from now on ``take`` does not wait and the descriptor stays readable, though late events may come."""
        self._over = True
        self._flag.set()

    def take(self, timeout: float) -> list[Event]:
        """Return what there is. If that is nothing, wait up to ``timeout`` seconds for something, unless ``end`` was called."""
        out = self._taken()
        until = clock.now() + min(timeout, _MAX_WAIT_S)
        while not out and not self._over and (left := until - clock.now()) > 0:
            poll = select.poll()
            poll.register(self._flag, select.POLLIN)
            poll.poll(left * 1e3)
            out = self._taken()
        return out

    def fileno(self) -> int:
        """Return a descriptor that polls readable while there is something to take, and always after the end."""
        return self._flag.fileno()

    def _taken(self) -> list[Event]:
        self._flag.clear()
        self._told = False  # before the events are taken, so that later ones are announced again
        if self._over:
            self._flag.set()
        out: list[Event] = []
        while True:
            try:
                out.append(self._events.popleft())
            except IndexError:
                return out


async def readable(source: Readable, timeout: float) -> bool:
    """Wait in asyncio until there is something to take.

    Any number of tasks may wait for one source, at no cost while nothing comes. After it returns True there may, rarely, be
    nothing to take, because another task was faster.

    Args:
        source: An ``Agent``, a ``WorkerSide``, or anything else with such a descriptor.
        timeout: The most seconds to wait.

    Returns:
        Whether there is something; false after ``timeout`` seconds.

    Raises:
        ArgumentError: An argument has the wrong type.
    """
    import asyncio  # here, because nothing else needs it

    arguments.instance("source", source, Readable)  # type: ignore[type-abstract]
    timeout = arguments.seconds("timeout", timeout)
    fd = os.dup(source.fileno())  # a loop allows only one reader of a descriptor
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
