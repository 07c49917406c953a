"""The other engine of ``played``: a process that offers prompts chunk by chunk, as if it computed them. It needs no vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from kvxfer.config import Config
from kvxfer.identity import FIRST, TransferId
from kvxfer.testing.engine import AgentEngine
from kvxfer.values import BlockTable, Offer
from kvxfer_bench.transfer.shapes import Model, Pool

BLOCK, BLOCKS, WAIT_S = 16, 2048, 60.0
MODEL = Model(8, 2, 256, BLOCK)


@dataclass(frozen=True)
class Prompt:
    """What a producer is to compute: in how many chunks, and how long they take it together."""

    transfer: TransferId
    digest: bytes
    tokens: int
    chunks: int = 1
    seconds: float = 0.0


class Producer:
    """Plays the prefill of prompts and offers them; ``played.engines`` has it in a process of its own.

    Args:
        config: Settings of kvxfer.
        facts: What its KV depends on.

    Attributes:
        source: Where it is found.
    """

    def __init__(self, config: dict[str, Any], facts: dict[str, str]) -> None:
        pool = Pool(MODEL, BLOCKS, "cpu")
        pool.fill()
        self._engine = AgentEngine(Config.from_mapping(config), name="producer", facts=facts, caches=(pool.cache,))
        self.source = self._engine.source

    def compute(self, prompt: Prompt) -> None:
        """Compute a prompt, and offer its chunks one by one."""
        begun, (agent,) = time.monotonic(), self._engine.agents
        for chunk in range(1, prompt.chunks + 1):
            sleep_until(begun + prompt.seconds * chunk / prompt.chunks)
            last = chunk == prompt.chunks
            tokens = prompt.tokens if last else prompt.tokens * chunk // prompt.chunks // BLOCK * BLOCK
            table = BlockTable.of([range(-(-tokens // BLOCK))])
            agent.offer(Offer(prompt.transfer, prompt.digest, FIRST, tokens, table, last))
            agent.events()

    def close(self) -> None:
        """End it."""
        self._engine.close()


def sleep_until(ends: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, ends - time.monotonic()))
