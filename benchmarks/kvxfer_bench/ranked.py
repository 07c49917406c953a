"""An engine of several ranks, driven by ``world.py``, that fills, offers, takes back and checks blocks by itself.

Every word of a cache says what it holds: the transfer, the generation, the token, the head and the layer. So a delivered block
proves where each of its bytes comes from, and an unused block proves that nobody has written to it.
"""

from __future__ import annotations

import heapq
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from kvxfer.config import Config
from kvxfer.identity import Generation, Handle, Source, TransferBase, TransferId
from kvxfer.protocol.values import Ended, GenerationReleased
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.usage import descriptors_open, resident, threads_running
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_bench.transfer.shapes import Model, Pool

LAYERS, HEADS, BLOCK_TOKENS, HEAD_WORDS = 2, 4, 16, 8
EACH = 6
"""Blocks of a transfer."""
FREE = -1
"""The value of every word of an unused block."""
LAG_S = 0.1
"""The ranks of an engine do the same thing within this time of each other."""
LOOK_S = 0.002


@dataclass(frozen=True)
class LoadResult:
    """How one load ended on the consumer.

    ``kind`` is ``delivered``, a kind of failure, or ``disagree`` if ranks were delivered different generations. ``late_s`` is the time
    past the deadline, less any in which this process did not run; 0 or less means in time. ``wrong`` says what is wrong with the bytes.
    """

    number: int
    kind: str
    reason: str
    late_s: float
    wrong: str


@dataclass
class _Use:
    """The blocks of a transfer in one engine, and the ranks that have not released them yet."""

    blocks: list[int]
    unreleased: set[int]
    begun: float = math.inf  # when the last rank has fetched it
    generations: dict[int, Generation] = field(default_factory=dict)  # by producer rank, the last offered or taken back
    ended: dict[int, Ended] = field(default_factory=dict)
    late_s: float = 0.0
    wrong: str = ""


class Stalls:
    """Records the times in which this process did not run, as seen by a thread that only sleeps."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[float, float]] = deque(maxlen=2000)
        self._before = time.monotonic()
        threading.Thread(target=self._watch, name="stalls", daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(0.01)
            now = time.monotonic()
            if now - self._before > 0.03:
                self._gaps.append((self._before, now))
            self._before = now

    def since(self, begin: float) -> float:
        """Return the seconds lost since a given time."""
        gaps = [*self._gaps, (self._before, time.monotonic())]
        return sum(b - max(a, begin) for a, b in gaps if b > begin)


class RankedEngine:
    """One engine with ``tp`` ranks in this process, which works only in ``step``.

    Ranks are assigned to ``devices``, one after the other. ``source``: where it is found.
    """

    def __init__(
        self, role: str, tp: int, blocks: int, seed: int, config: dict[str, Any], devices: Sequence[str]
    ) -> None:
        self._role, self._tp = role, tp
        self._config = Config.from_mapping(config)
        self._rng = random.Random(seed)
        model = Model(LAYERS, HEADS // tp, 8 * HEAD_WORDS, BLOCK_TOKENS)
        self._words = [Pool(model, blocks, devices[rank % len(devices)], (rank, tp)) for rank in range(tp)]
        for cache in self._words:
            cache.put(range(blocks), FREE)
        self._engine = AgentEngine(self._config, name=role, caches=[cache.cache for cache in self._words])
        self._agents, self.source = self._engine.agents, self._engine.source
        self._free = list(range(blocks))
        self._uses: dict[int, _Use] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._stalls = Stalls()
        self._results: list[LoadResult] = []
        self._complaints: list[str] = []

    def step(
        self, serve: list[tuple[int, int, bool]], load: list[tuple[int, Source, bool]], seconds: float
    ) -> tuple[list[LoadResult], list[str], int]:
        """Begin these transfers, then work for this many seconds.

        The transfers in ``serve`` are offered, each with the number of generations that it goes through and whether to take the last one
        back. Those in ``load`` are fetched, each with its source and whether to cancel it at some time.

        Returns:
            The loads that ended, what went wrong, and how many transfers hold blocks.
        """
        for number, generations, gone in serve:
            self._serve(number, generations, gone)
        for number, source, cancelled in load:
            self._load(number, source, cancelled)
        until = time.monotonic() + seconds
        while True:
            for rank, agent in enumerate(self._agents):
                for event in agent.events():
                    self._take(rank, event)
            self._do_what_is_due()  # after it is known what has ended while we were not asked to work: that is not offered again
            if time.monotonic() >= until:
                break
            time.sleep(LOOK_S)
        results, self._results = self._results, []
        complaints, self._complaints = self._complaints, []
        return results, complaints, len(self._uses)

    def vitals(self) -> dict[str, float]:
        """Return the resources that the process and its agents hold."""
        stats = [agent.stats() for agent in self._agents]
        return {
            "device_MiB": 0.0 if self._words[0].device == "cpu" else device_mib(),
            "host_MiB": round(resident() / (1 << 20), 2),
            "descriptors": descriptors_open(),
            "threads": threads_running(),
            "fetches": sum(s.fetches for s in stats),
            "leases": sum(s.offers for s in stats),
            "quarantined_bytes": sum(s.quarantined_bytes for s in stats),
        }

    def close(self) -> None:
        self._engine.close()

    # --- the producer ----------------------------------------------------------------------------------------------

    def _serve(self, number: int, generations: int, gone: bool) -> None:
        blocks = self._lend(number)
        if blocks is None:
            return
        for rank in range(self._tp):
            at = self._rng.uniform(0, LAG_S)
            for generation in map(Generation, range(1, generations + 1)):
                if (
                    generation > 1
                ):  # a preemption: what was offered is taken back, and computed again in the same blocks
                    at += self._rng.uniform(0, 4 * LAG_S)
                    self._at(at, partial(self._take_back, rank, number, Generation(generation - 1), False))
                for tokens in (2 * BLOCK_TOKENS, 4 * BLOCK_TOKENS, EACH * BLOCK_TOKENS):
                    at += self._rng.uniform(0, LAG_S)
                    self._at(at, partial(self._offer, rank, number, generation, tokens))
            if gone:
                self._at(at + self._rng.uniform(0, LAG_S), partial(self._take_back, rank, number, generation, True))

    def _offer(self, rank: int, number: int, generation: Generation, tokens: int) -> None:
        if number not in self._uses or rank not in self._uses[number].unreleased:
            return
        blocks = self._uses[number].blocks[: tokens // BLOCK_TOKENS]
        self._uses[number].generations[rank] = generation
        self._words[rank].put(blocks, _words(number, generation, tokens, rank, self._tp))
        final = tokens == EACH * BLOCK_TOKENS
        self._agents[rank].offer(
            Offer(_transfer(number), b"digest", generation, tokens, BlockTable.of([blocks]), final)
        )

    def _take_back(self, rank: int, number: int, generation: Generation, gone: bool) -> None:
        if number in self._uses and rank in self._uses[number].unreleased:
            self._uses[number].generations[rank] = generation
            self._agents[rank].revoke(_transfer(number), generation, "the engine took the blocks", gone)
            self._words[rank].put(self._uses[number].blocks, FREE - 1)  # another request's bytes

    # --- the consumer ----------------------------------------------------------------------------------------------

    def _load(self, number: int, source: Source, cancelled: bool) -> None:
        blocks = self._lend(number)
        if blocks is None:
            return
        for rank, agent in enumerate(self._agents):
            begin = partial(self._fetch, rank, number, source)
            self._at(self._rng.uniform(0, LAG_S), begin)
            if cancelled:
                at = LAG_S + self._rng.uniform(0, 10 * LAG_S)
                self._at(at, partial(agent.cancel, Handle(str(number)), "the client left"))

    def _fetch(self, rank: int, number: int, source: Source) -> None:
        use = self._uses[number]
        use.begun = time.monotonic()
        own = self.source if self._tp > 1 else None
        table = BlockTable.of([use.blocks])
        tokens = EACH * BLOCK_TOKENS
        self._agents[rank].fetch(
            Fetch(Handle(str(number)), _transfer(number), b"digest", source, table, 0, tokens, own)
        )

    def _take(self, rank: int, event: Any) -> None:
        if isinstance(event, GenerationReleased):
            return  # a former generation's blocks: here they are others' from the revocation on
        number = event.transfer.prompt
        use = self._uses.get(number)
        if use is None:
            # An agent remembers ended transfers only for a while, so a process that was stopped for longer may hear of one twice.
            if self._stalls.since(time.monotonic() - 60) > self._config.lease:
                return
            self._complaints.append(f"{self._role}: an event came for transfer {number}, which is over: {event}")
        elif isinstance(event, Ended):
            if event.role == "consumer":
                self._ended(rank, number, use, event)
        elif event.role == "consumer" or event.generation >= use.generations[rank]:  # else another release follows
            if event.role == "consumer" and rank not in use.ended:
                self._complaints.append(f"{self._role}: rank {rank} released transfer {number}, which had no outcome")
            use.unreleased.discard(rank)
            if not use.unreleased:
                self._give_back(number)

    def _ended(self, rank: int, number: int, use: _Use, event: Ended) -> None:
        if rank in use.ended:
            self._complaints.append(f"{self._role}: transfer {number} ended on rank {rank} twice: {event}")
            return
        use.late_s = max(use.late_s, event.seconds - self._config.longest - self._stalls.since(use.begun))
        use.ended[rank] = event
        if event.outcome.delivered:
            assert event.generation is not None  # every rank reads something
            want = _words(number, event.generation, EACH * BLOCK_TOKENS, rank, self._tp)
            found = self._words[rank].get(use.blocks)
            if not (found == want).all():
                other = int(found[found != want][0])
                use.wrong = f"rank {rank}, generation {event.generation}: a word is {other:#x}"
        if len(use.ended) < self._tp:
            return
        kinds = [e.outcome for e in use.ended.values()]
        bad = next((o for o in kinds if not o.delivered), None)
        kind, reason = ("delivered", "") if bad is None else (str(bad.kind), str(bad))
        if bad is None and len({e.generation for e in use.ended.values()}) > 1:
            kind = "disagree"
        self._results.append(LoadResult(number, kind, reason, use.late_s, use.wrong))

    # --- blocks ----------------------------------------------------------------------------------------------------

    def _lend(self, number: int) -> list[int] | None:
        """Give a transfer blocks, in random order, or none while too few are free. They must be unchanged since they were given back."""
        if len(self._free) < EACH:
            return None
        self._rng.shuffle(self._free)
        blocks = [self._free.pop() for _ in range(EACH)]
        if any((cache.get(blocks) != FREE).any() for cache in self._words):
            self._complaints.append(f"{self._role}: blocks {blocks} were written to after they had been released")
        self._uses[number] = _Use(blocks, set(range(self._tp)))
        return blocks

    def _give_back(self, number: int) -> None:
        blocks = self._uses.pop(number).blocks
        for cache in self._words:
            cache.put(blocks, FREE)
        self._free += blocks

    def _at(self, delay: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (time.monotonic() + delay, self._count, call))

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()


def _transfer(number: int) -> TransferId:
    return TransferId(TransferBase("chaos"), number)


def _words(number: int, generation: Generation, tokens: int, rank: int, tp: int) -> np.ndarray[Any, Any]:
    """Return what a rank's blocks hold for a transfer's first tokens: int64 ``[layer, block, token, head, word]``."""
    heads = HEADS // tp
    layer, block, token, head, word = np.ogrid[
        :LAYERS, : tokens // BLOCK_TOKENS, :BLOCK_TOKENS, rank * heads : (rank + 1) * heads, :HEAD_WORDS
    ]
    place = ((layer * 64 + block) * 64 + token) * 64 + head * HEAD_WORDS + word
    return np.asarray(number * (1 << 40) + generation * (1 << 32) + place, np.int64)


def device_mib() -> float:
    """Return the GPU memory in use by all processes on all GPUs. Memory of a dead peer counts as long as any process maps it."""
    import torch

    each = (torch.cuda.mem_get_info(device) for device in range(torch.cuda.device_count()))
    return round(float(sum(total - free for free, total in each)) / (1 << 20), 2)
