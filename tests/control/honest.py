"""Honest engines beside greedy peers, made in processes of their own."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.identity import FIRST, Handle, Source, TransferBase, TransferId
from kvxfer.protocol import messages as m
from kvxfer.testing.engine import AgentEngine, PagedMemory
from kvxfer.values import BlockTable, Fetch, Offer

DESCRIPTORS = 1024
"""The soft limit of descriptors in each process, as is usual."""
BLOCKS, ROW = 1024, 256
"""Blocks of a load, and bytes of each, which are too few to go without packing."""
BAIT = TransferId(TransferBase("own/1/bait"), 0)
"""The transfer whose digest the greedy peer knows."""


def limited(make: Callable[..., Any], *args: Any) -> Any:
    """Make an object in a process with the usual number of descriptors, without its warnings about each refusal."""
    logging.getLogger("kvxfer").setLevel(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return make(*args)


class HonestEngine(AgentEngine):
    """An engine that offers or loads one transfer after the other, in several staged pieces each."""

    def __init__(self, config: Config) -> None:
        memory = PagedMemory(layers=1, blocks=BLOCKS, tokens=1, heads=1, unit=ROW)
        super().__init__(config, memory)
        self.table = BlockTable.of([range(BLOCKS)])

    def offer(self, transfer: TransferId, consumers: int = 1) -> None:
        """Offer a transfer to ``consumers`` engines."""
        self.agents[0].offer(Offer(transfer, b"d", FIRST, BLOCKS, self.table, True, consumers=consumers))

    def load(self, source: Source, transfer: TransferId, seconds: float) -> str:
        """Load a transfer; return how that ended."""
        handle = Handle(str(transfer))
        self.agents[0].fetch(Fetch(handle, transfer, b"d", source, self.table, 0, BLOCKS))
        outcome = self.over(handle, seconds).outcome
        return "delivered" if outcome.delivered else str(outcome)


class Prefill:
    """A directory of an engine that begins with a transfer when it is told to."""

    def __init__(self, config: Config) -> None:
        self._asked: Counter[TransferId] = Counter()
        self._begun = threading.Event()
        self._directory = Directory(config, "prefill")
        self._directory.begun = self._has_begun

    def _has_begun(self, transfer: TransferId, digest: bytes) -> bool:
        self._asked[transfer] += 1
        return self._begun.is_set()

    def source(self) -> Source:
        """Return where it is."""
        return self._directory.source

    def asked(self, transfer: TransferId, engines: int, seconds: float) -> int:
        """Wait until ``engines`` have asked whether it has begun; return how many have."""
        until = time.monotonic() + seconds
        while self._asked[transfer] < engines and time.monotonic() < until:
            time.sleep(0.01)
        return self._asked[transfer]

    def begin(self, transfer: TransferId) -> None:
        """Begin with a transfer, and tell all who wait for that."""
        self._begun.set()
        self._directory.begins(transfer, b"d")

    def close(self) -> None:
        """End it."""
        self._directory.close()


class Fleet:
    """Directories of many engines, each of which waits for one other engine to begin."""

    def __init__(self, config: Config, engines: int) -> None:
        self._directories = [Directory(config, f"fleet {i}") for i in range(engines)]
        self._heard: set[int] = set()

    def ask(self, source: Source, transfer: TransferId) -> None:
        """Have each ask when the other engine begins with the transfer."""
        for directory in self._directories:
            directory.tell(source, m.Await(source.epoch, (m.Named(transfer, b"d"),)))

    def heard(self, source: Source, transfer: TransferId, seconds: float) -> tuple[int, int]:
        """Wait until each has heard that it has.

        Returns:
            How many have, and how often one was cut off. It then asks again, as an engine does.
        """
        until, cut = time.monotonic() + seconds, 0
        while len(self._heard) < len(self._directories) and time.monotonic() < until:
            for i, directory in enumerate(self._directories):
                for notice in directory.notices():
                    if isinstance(notice, m.Begun):
                        self._heard.add(i)
                    else:
                        cut += 1
                        directory.tell(source, m.Await(source.epoch, (m.Named(transfer, b"d"),)))
            time.sleep(0.01)
        return len(self._heard), cut

    def close(self) -> None:
        """End all of them."""
        for directory in self._directories:
            directory.begin_close()
        for directory in self._directories:
            directory.close()
