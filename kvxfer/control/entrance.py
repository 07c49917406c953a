"""Where peers that dial begin: who may, by host, and whose key no longer counts.

Names of the allow-list and a changed key file are looked at on another thread. Only those wait for it whom it decides about.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol, TypeVar

from kvxfer.control.admission import Admission
from kvxfer.control.connection import ControlConnection
from kvxfer.security import Security

__all__ = ["Apart", "Entrance"]

KEYS_S = 1.0
"""Seconds between two looks at whether the keys have changed."""

T = TypeVar("T")


class Apart(Protocol):
    """How a job that may block is done: on another thread, and what follows from its result on this one. Returns false if it cannot be."""

    def __call__(self, job: Callable[[], T], then: Callable[..., None], /) -> bool: ...


class Entrance:
    """Lets peers begin: ``begin`` is told once it is known whether one may. Used by the thread of the control sockets."""

    def __init__(self, security: Security, apart: Apart, begin: Callable[[ControlConnection, bool], None]) -> None:
        self._security, self._apart, self._begin = security, apart, begin
        self._admission = Admission(security.peers)
        self._held: list[ControlConnection] = []
        self._looking = False
        self._look_at = 0.0
        self._keys = security.keys

    def refuses(self, host: str) -> bool:
        """Return whether nobody from this address may connect, whatever there is to look at."""
        return self._admission.admits(host) is False

    def knock(self, conn: ControlConnection) -> None:
        """Have a peer begin, now or later."""
        admitted = self._admission.admits(conn.host)
        if admitted is None or not self._security.fresh:
            self._held.append(conn)
        else:
            self._begin(conn, admitted)
        self._look()

    def turn(self, open_: Iterable[ControlConnection]) -> Iterator[ControlConnection]:
        """Do what is due, once a turn; yield the open connections whose keys have been taken out of the key file."""
        if self._held:
            self._look()
        if self._keys is None or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + KEYS_S
        if not self._security.fresh:
            self._apart(self._security.refresh, _nothing)
        if self._keys is not self._security.keys:
            self._keys = self._security.keys
            yield from [conn for conn in open_ if conn.key_id is not None and not self._security.accepts(conn.key_id)]

    def _look(self) -> None:
        names = self._admission.old or any(self._admission.admits(conn.host) is None for conn in self._held)
        if (self._held or names) and not self._looking:
            self._looking = self._apart(partial(self._look_apart, names), self._looked)

    def _look_apart(self, names: bool) -> None:
        """Look at the keys, and at the names if that is wanted; on the other thread."""
        self._security.refresh()
        if names:
            self._admission.resolve()

    def _looked(self, found: object) -> None:
        self._looking = False
        held, self._held = self._held, []
        for conn in held:
            self._begin(conn, self._admission.admits(conn.host) is True)


def _nothing(found: object) -> None:
    """Do nothing."""
