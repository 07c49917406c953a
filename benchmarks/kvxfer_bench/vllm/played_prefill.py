"""The other engine of ``played``: a process that offers prompts chunk by chunk, as if it computed them. It needs no vLLM."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import bands
from kvxfer.identity import FIRST, Source, TransferId
from kvxfer.values import BlockTable, Offer
from kvxfer_bench.transfer.shapes import Model, Pool

BLOCK, BLOCKS, WAIT_S = 16, 2048, 60.0
MODEL = Model(8, 2, 256, BLOCK)

spawn = mp.get_context("spawn")


@dataclass(frozen=True)
class Prompt:
    """What a producer is to compute: in how many chunks, and how long they take it together.

    banded: It says of each band of layers when that is computed.
    """

    transfer: TransferId
    digest: bytes
    tokens: int
    chunks: int
    seconds: float
    banded: bool = False


class Producer:
    """A process that plays the prefill of prompts and offers them.

    Args:
        config: Settings of kvxfer.
        facts: What its KV depends on.
        block_tokens: Of its blocks.

    Attributes:
        source: Where it is found.
    """

    def __init__(self, config: dict[str, Any], facts: dict[str, str], block_tokens: int = BLOCK) -> None:
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_prefill, args=(theirs, config, facts, block_tokens), daemon=True)
        self._process.start()
        self.source: Source = self._pipe.recv()

    def begin(self, prompt: Prompt) -> None:
        """Have a prompt computed."""
        self._pipe.send(prompt)

    def last_token(self) -> float:
        """Return when it computed the last token, by the host's monotonic clock, once all is offered."""
        at: float = self._pipe.recv()
        return at

    def close(self) -> None:
        """End it."""
        self._pipe.send(None)
        self._process.join(WAIT_S)


def _prefill(pipe: Connection, settings: dict[str, Any], facts: dict[str, str], block_tokens: int) -> None:
    pool = Pool(replace(MODEL, block_tokens=block_tokens), BLOCKS * BLOCK // block_tokens, "cpu")
    pool.fill()
    config = Config.from_mapping(settings)
    with Agent(pool.cache, config, "producer", facts) as agent, Directory(config, "producer", facts=facts) as directory:
        directory.publish((agent.descriptor,))
        pipe.send(directory.source)
        while (prompt := pipe.recv()) is not None:
            begun = at = time.monotonic()
            layers = len(bands(pool.cache)) if prompt.banded else 1
            for chunk, band in itertools.product(range(1, prompt.chunks + 1), range(1, layers + 1)):
                sleep_until(begun + prompt.seconds * (chunk - 1 + band / layers) / prompt.chunks)
                last, at = chunk == prompt.chunks, time.monotonic()
                tokens = prompt.tokens if last else prompt.tokens * chunk // prompt.chunks // BLOCK * BLOCK
                table = BlockTable.of([range(-(-tokens // block_tokens))])
                if band == layers:
                    agent.offer(Offer(prompt.transfer, prompt.digest, FIRST, tokens, table, last))
                elif agent.banded(prompt.transfer, tokens):
                    agent.offer(Offer(prompt.transfer, prompt.digest, FIRST, tokens, table, False, bands=band))
                agent.events()
            pipe.send(at)


def sleep_until(ends: float) -> None:
    """Sleep until a time of the monotonic clock."""
    time.sleep(max(0.0, ends - time.monotonic()))
