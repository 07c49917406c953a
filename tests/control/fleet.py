"""Directories of many engines, of one that they wait for, and who fills that one with connections: each in a process of its own."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.sockets import ControlSockets, address
from kvxfer.identity import Source, TransferBase, TransferId
from kvxfer.protocol import messages as m
from kvxfer.security import Security

DESCRIPTORS = 1024
"""The soft limit of descriptors in each process, as is usual."""
AWAITED = m.Named(TransferId(TransferBase("own/1/awaited"), 0), b"d")


def limited(make: Callable[..., Any], *args: Any) -> Any:
    """Make an object in a process with the usual number of descriptors, without its warnings about each refusal."""
    logging.getLogger("kvxfer").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return make(*args)


class Prefill:
    """A directory of an engine that begins with a transfer when it is told to."""

    def __init__(self, config: Config) -> None:
        self._asked, self._begun = 0, threading.Event()
        self._directory = Directory(config, "prefill")
        self._directory.begun = self._has_begun
        self.close = self._directory.close

    def _has_begun(self, transfer: TransferId, digest: bytes) -> bool:
        self._asked += 1
        return self._begun.is_set()

    def source(self) -> Source:
        """Return where it is."""
        return self._directory.source

    def asked(self, engines: int, seconds: float) -> int:
        """Wait until ``engines`` have asked whether it has begun; return how many have."""
        until = time.monotonic() + seconds
        while self._asked < engines and time.monotonic() < until:
            time.sleep(0.01)
        return self._asked

    def begin(self) -> None:
        """Begin with the transfer, and tell all who wait for that."""
        self._begun.set()
        self._directory.begins(AWAITED.transfer, AWAITED.digest)


class Fleet:
    """Directories of many engines, each of which waits for one other engine to begin."""

    def __init__(self, config: Config, engines: int) -> None:
        self._directories = [Directory(config, f"fleet {i}") for i in range(engines)]

    def ask(self, source: Source) -> None:
        """Have each ask when the other engine begins with the transfer."""
        for directory in self._directories:
            directory.tell(source, m.Await(source.epoch, (AWAITED,)))

    def heard(self, source: Source, seconds: float) -> tuple[int, int]:
        """Wait until each has heard that it has.

        Returns:
            How many have, and how often one was cut off. It then asks again, as an engine does.
        """
        until, cut, heard = time.monotonic() + seconds, 0, set[int]()
        while len(heard) < len(self._directories) and time.monotonic() < until:
            for i, directory in enumerate(self._directories):
                for notice in directory.notices():
                    if isinstance(notice, m.Begun):
                        heard.add(i)
                    else:
                        cut += 1
                        directory.tell(source, m.Await(source.epoch, (AWAITED,)))
            time.sleep(0.01)
        return len(heard), cut

    def close(self) -> None:
        """End all of them."""
        for directory in self._directories:
            directory.begin_close()
        for directory in self._directories:
            directory.close()


class Hoarder:
    """A peer that keeps connections over which nothing is said."""

    def __init__(self, config: Config) -> None:
        self._sockets = ControlSockets(Security.of(config))
        self.close = self._sockets.close

    def hoard(self, source: Source, connections: int) -> int:
        """Make connections to a directory, as fast as they are accepted; return how many came about."""
        made = []
        for _ in range(0, connections, 16):
            made += [self._sockets.dial(address(source.host, source.port), None, m.MAX_BYTES) for _ in range(16)]
            until = time.monotonic() + 10.0
            while not all(one.opened or one.lost for one in made) and time.monotonic() < until:
                self._sockets.poll(0.01)
        return sum(one.opened for one in made)
