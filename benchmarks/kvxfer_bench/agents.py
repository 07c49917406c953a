"""Engines of bare agents that do nothing but loads: for benchmarks of what a load costs besides its bytes."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.geometry import Cache, Group
from kvxfer.identity import FIRST, Handle, Source, TransferBase, TransferId
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.usage import descriptors_open, threads_running
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_bench.cpu import ENGINE, spent
from kvxfer_bench.transfer.shapes import Model, Pool

BASE = TransferBase("own/1/bench")
BLOCKS, TOKENS = 1 << 16, 16
TICK_S = 0.01
PROMPTS, POOL_BLOCKS = Model(8, 2, 256, 16), 2048
"""The cache of a ``Producer``."""


def small_cache(blocks: int, block: int) -> Cache:
    """Return a cache of one layer, whose blocks hold 16 tokens and are never cut."""
    memory = np.zeros((1, blocks, block), np.uint8)
    return Cache.of_tensors(memory, "layer block unit", group=Group(TOKENS))


def offered(number: int, blocks: Sequence[int] | Ints, tokens: int) -> Offer:
    """Return the offer of a whole prompt, by the transfer's number."""
    return Offer(TransferId(BASE, number), b"d", FIRST, tokens, BlockTable.of([blocks]), True)


def fetched(number: int, source: Source, blocks: Sequence[int] | Ints, tokens: int) -> Fetch:
    """Return the fetch of such a prompt."""
    return Fetch(Handle(str(number)), TransferId(BASE, number), b"d", source, BlockTable.of([blocks]), 0, tokens)


class LoadEngine(AgentEngine):
    """Engines of one rank each in one process, which share one cache. A load is one small block.

    Their warnings about each load that is refused are not printed.

    Attributes:
        released: How many loads or offers are over since the last ``until``.
    """

    def __init__(self, config: Config, engines: int = 1, block: int = 256) -> None:
        logging.getLogger("kvxfer").setLevel(logging.ERROR)
        cache = small_cache(BLOCKS, block)
        super().__init__(config, name="bench", caches=[cache])
        self.agents += [Agent(cache, config, f"bench-{i}") for i in range(1, engines)]  # which nobody is to find
        self._forget()

    def _forget(self) -> None:
        self._outcomes: Counter[str] = Counter()
        self._words: dict[str, str] = {}  # the first message for each kind of failure
        self._seconds: list[float] = []
        self.released = 0

    def offer(self, first: int, count: int) -> None:
        """Offer ``count`` transfers, numbered from ``first`` on."""
        for i in range(first, first + count):
            self.agents[0].offer(offered(i, [i % BLOCKS], TOKENS))
        self.listen()

    def fetch(self, source: Source, first: int, count: int) -> None:
        """Have each engine fetch ``count`` transfers, one after the other."""
        for e, agent in enumerate(self.agents):
            for i in range(first + e * count, first + (e + 1) * count):
                agent.fetch(fetched(i, source, [i % BLOCKS], TOKENS))

    def pace(self, source: Source | None, first: int, rate: float, seconds: float) -> int:
        """Offer (without a source) or fetch ``rate`` transfers per second, as far as that is possible; return how many."""
        begin, done = time.monotonic(), 0
        while (now := time.monotonic()) < begin + seconds:
            due = int((now - begin) * rate) - done
            if due and source is None:
                self.offer(first + done, due)
            elif due and source is not None:
                self.fetch(source, first + done, due)
            done += due
            self.listen()
            time.sleep(TICK_S)
        return done

    def links(self) -> int:
        """Return how many links are up."""
        return sum(link.up for agent in self.agents for link in agent.links())

    def until(self, released: int, seconds: float) -> dict[str, Any]:
        """Wait until this many transfers are released, return how they ended, and forget them."""
        end = time.monotonic() + seconds
        while self.released < released and time.monotonic() < end:
            self.listen()
            time.sleep(TICK_S)
        told = {"outcomes": dict(self._outcomes), "words": self._words, "missing": released - self.released}
        found = {**told, "seconds": self._seconds}
        self._forget()
        return found

    def listen(self, timeout: float = 0.0) -> None:
        """Take in what has ended; if nothing has, wait for that, at each engine."""
        for agent in self.agents:
            for event in agent.events(timeout):
                if isinstance(event, Ended):
                    kind = str(event.outcome.kind or "delivered")
                    self._outcomes[kind] += 1
                    if event.outcome.failure is not None:
                        self._words.setdefault(kind, event.outcome.failure.detail)
                    self._seconds.append(event.seconds)
                elif isinstance(event, Released):
                    self.released += 1

    def cpu(self) -> Counter[str]:
        """Return the CPU seconds of the process so far, by thread: ``control``, ``data`` and all others together."""
        cpu = spent().cpu
        return Counter({ENGINE: cpu.total() - cpu["control"] - cpu["data"]} | {n: cpu[n] for n in ("control", "data")})

    def vitals(self) -> dict[str, float]:
        """Return the process's CPU seconds, resident MiB, threads and file descriptors."""
        with open("/proc/self/statm") as f:
            pages = int(f.read().split()[1])
        return {
            "cpu_s": time.process_time(),
            "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "threads": threads_running(),
            "descriptors": descriptors_open(),
        }


class Producer(AgentEngine):
    """Offers prompts chunk by chunk, as if it computed them.

    Args:
        config: Settings of kvxfer.
        facts: What its KV depends on.
    """

    def __init__(self, config: dict[str, Any], facts: dict[str, str]) -> None:
        pool = Pool(PROMPTS, POOL_BLOCKS)
        pool.fill()
        super().__init__(Config.from_mapping(config), name="producer", facts=facts, caches=(pool.cache,))

    def compute(self, transfer: TransferId, digest: bytes, tokens: int, chunks: int = 1, seconds: float = 0.0) -> None:
        """Compute a prompt in ``chunks`` chunks, which take ``seconds`` together, and offer them one by one."""
        begun, (agent,) = time.monotonic(), self.agents
        for chunk in range(1, chunks + 1):
            sleep_until(begun + seconds * chunk / chunks)
            last = chunk == chunks
            done = tokens if last else tokens * chunk // chunks // PROMPTS.block_tokens * PROMPTS.block_tokens
            table = BlockTable.of([range(PROMPTS.prompt_blocks(done))])
            agent.offer(Offer(transfer, digest, FIRST, done, table, last))
            agent.events()


def sleep_until(ends: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, ends - time.monotonic()))
