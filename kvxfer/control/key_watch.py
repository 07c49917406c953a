"""Has a key file that has changed read again, on a thread that ends with that: reading may block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

from kvxfer import clock
from kvxfer.control.connection import ControlConnection
from kvxfer.security import Security
from kvxfer.threads import NamedThread

KEYS_S = 1.0
"""Seconds between two looks at whether the keys have changed."""


class KeyWatch:
    """Knows whether the keys are those of the file. Used by the thread of the control sockets, which ``wake`` wakes."""

    def __init__(self, security: Security, wake: Callable[[], None]) -> None:
        self._security, self._wake = security, wake
        self._held: list[Callable[[], None]] = []
        self._reading: threading.Event | None = None  # set once the file has been read
        self._look_at = 0.0
        self._keys = security.keys

    def when_read(self, begin: Callable[[], None]) -> None:
        """Call this now, or as soon as a key file that has changed is read."""
        if self._security.fresh:
            begin()
        else:
            self._held.append(begin)
            self._read()

    def turn(self, open_: Iterable[ControlConnection]) -> Iterator[ControlConnection]:
        """Do what is due, once a turn; yield the open connections whose keys have been taken out of the key file."""
        if self._held:
            self._read()
        if self._reading is not None and self._reading.is_set():
            self._reading, held, self._held = None, self._held, []
            for begin in held:
                begin()
        if self._keys is None or clock.now() < self._look_at:
            return
        self._look_at = clock.now() + KEYS_S
        if not self._security.fresh:
            self._read()
        if self._keys is not self._security.keys:
            self._keys = self._security.keys
            yield from [conn for conn in open_ if conn.key_id is not None and not self._security.accepts(conn.key_id)]

    def _read(self) -> None:
        if self._reading is None:
            read = threading.Event()
            with suppress(RuntimeError):  # there is no thread now; the next turn tries again
                NamedThread(self._run, "kvxfer-keys", (read,)).start()
                self._reading = read

    def _run(self, read: threading.Event) -> None:
        try:
            self._security.refresh()
        finally:
            read.set()  # before the wake: the other thread looks then, and not when this one has ended
            self._wake()
