"""Measures what the calls of a transfer cost the engine's thread: ``Agent.offer`` and ``Agent.fetch`` of a prompt of 1,024 tokens.

Times are CPU time of the calling thread, the median of many calls. An engine's step leaves nothing of kvxfer in the processor's
caches, so each call is also measured after as much memory has been read as they hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import numpy as np

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache
from kvxfer.identity import FIRST, Handle, TransferBase, TransferId
from kvxfer.protocol.values import Ended, Released
from kvxfer.values import BlockTable, Fetch, Offer

TOKENS, BLOCK_TOKENS = 1024, 16
BLOCKS = TOKENS // BLOCK_TOKENS
CALLS = 200
FLUSH = 64 << 20
"""Bytes that are read to have cold caches."""
PATIENCE_S = 30.0


def thread_us(config: Config, calls: int = CALLS) -> dict[str, float]:
    """Return the microseconds of CPU that each call takes on its thread, by the call's name; ``cold``: with cold caches.

    Raises:
        SystemExit: A transfer was not delivered.
    """
    memory = [np.zeros((1, BLOCKS, BLOCK_TOKENS, 16), np.uint8) for _ in range(2)]
    producer, consumer = (Agent(Cache.of_tensors(one, "layer block token unit"), config) for one in memory)
    flushed = np.zeros(FLUSH, np.uint8)
    spent: dict[str, list[int]] = {}

    def timed(name: str, call: Callable[[], None], cold: bool) -> None:
        if cold:
            flushed.max()
            name += "_cold"
        begin = time.thread_time_ns()
        call()
        spent.setdefault(name, []).append(time.thread_time_ns() - begin)

    with producer, consumer, Directory(config, "calls", epoch=producer.epoch) as directory:
        directory.publish((producer.descriptor,))
        table = BlockTable.of([range(BLOCKS)])
        for i in range(2 * calls):
            transfer, cold = TransferId(TransferBase("own/1/calls"), i), i % 2 == 1
            offer = Offer(transfer, b"d", FIRST, TOKENS, table, True)
            fetch = Fetch(Handle(str(i)), transfer, b"d", directory.source, table, 0, TOKENS)
            timed("offer", lambda offer=offer: producer.offer(offer), cold)  # type: ignore[misc]
            timed("fetch", lambda fetch=fetch: consumer.fetch(fetch), cold)  # type: ignore[misc]
            _released((producer, consumer))
    return {name: round(statistics.median(each) / 1e3, 1) for name, each in sorted(spent.items())}


def _released(agents: Iterable[Agent]) -> None:
    """Wait until a transfer is over on both sides."""
    for agent in agents:
        until, over = time.monotonic() + PATIENCE_S, False
        while not over and time.monotonic() < until:
            for event in agent.events(1.0):
                if isinstance(event, Ended) and not event.outcome.delivered:
                    raise SystemExit(f"a transfer was not delivered: {event}")
                over |= isinstance(event, Released)
        if not over:
            raise SystemExit(f"a transfer was not released within {PATIENCE_S:g} s")
