"""Engines that exchange transfers while some of them are killed or stopped: for ``kvxfer bench chaos`` and ``kvxfer bench soak``.

What must hold, whatever is done to them: every load ends exactly once and in time; what is delivered belongs to one generation, byte
for byte, on all ranks; all blocks come back, and nobody writes to them afterwards.

Every word of a cache says what it holds: the transfer, the generation, the token, the head and the layer. So a delivered block
proves where each of its bytes comes from, and an unused block proves that nobody has written to it.
"""

from __future__ import annotations

import heapq
import json
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import numpy as np
import typer

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.identity import Generation, Handle, Source, TransferBase, TransferId
from kvxfer.protocol.values import Ended, GenerationReleased
from kvxfer.testing.engine import AgentEngine
from kvxfer.testing.remote import Remote
from kvxfer.testing.usage import descriptors_open, resident, threads_running
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_bench.transfer.shapes import Model, Pool, cache_devices

LAYERS, HEADS, BLOCK_TOKENS, HEAD_WORDS = 2, 4, 16, 8
EACH = 6
"""Blocks of a transfer."""
FREE = -1
"""The value of every word of an unused block."""
LAG_S = 0.1
"""The ranks of an engine do the same thing within this time of each other."""
LOOK_S = 0.002

SETTINGS: dict[str, Any] = {
    "transfer_timeout": 6.0,
    "lease": 6.0,
    "peer_timeout": 2.0,
    "staging_bytes": 4 << 20,
    "integrity": "full",
}
TURN_S = 0.05
"""How long a turn takes, unless an engine answers late."""
ANSWER_S = 2 * TURN_S
"""How long a turn waits for an engine's answer."""
LATE_S = 1.0
"""How long after its deadline an outcome may come, not counting the time in which the process did not run."""
START_S = 180.0
"""How long an engine may take to start."""
REST_S = 2 * SETTINGS["transfer_timeout"] + 3 * SETTINGS["lease"]
"""Time in which all blocks must be back once nothing more begins."""


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


class RankedEngine(AgentEngine):
    """One engine with ``tp`` ranks in this process, which works only in ``step``.

    Ranks are assigned to ``devices``, one after the other.
    """

    def __init__(
        self, role: str, tp: int, blocks: int, seed: int, config: dict[str, Any], devices: Sequence[str]
    ) -> None:
        self._role, self._tp, self._rng = role, tp, random.Random(seed)
        model = Model(LAYERS, HEADS // tp, 8 * HEAD_WORDS, BLOCK_TOKENS)
        self._words = [Pool(model, blocks, devices[rank % len(devices)], (rank, tp)) for rank in range(tp)]
        for cache in self._words:
            cache.put(range(blocks), FREE)
        super().__init__(Config.from_mapping(config), name=role, caches=[cache.cache for cache in self._words])
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
            for rank, agent in enumerate(self.agents):
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
        stats = [agent.stats() for agent in self.agents]
        return {
            "device_MiB": 0.0 if self._words[0].device == "cpu" else device_mib(),
            "host_MiB": round(resident() / (1 << 20), 2),
            "descriptors": descriptors_open(),
            "threads": threads_running(),
            "fetches": sum(s.fetches for s in stats),
            "leases": sum(s.offers for s in stats),
            "quarantined_bytes": sum(s.quarantined_bytes for s in stats),
        }

    # --- the producer ----------------------------------------------------------------------------------------------

    def _serve(self, number: int, generations: int, gone: bool) -> None:
        blocks = self._lend(number)
        if blocks is None:
            return
        for rank in range(self._tp):
            at = self._rng.uniform(0, LAG_S)
            for generation in map(Generation, range(1, generations + 1)):
                if generation > 1:  # a preemption: what was offered is taken back, and computed again in its blocks
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
        self.agents[rank].offer(Offer(_transfer(number), b"digest", generation, tokens, BlockTable.of([blocks]), final))

    def _take_back(self, rank: int, number: int, generation: Generation, gone: bool) -> None:
        if number in self._uses and rank in self._uses[number].unreleased:
            self._uses[number].generations[rank] = generation
            self.agents[rank].revoke(_transfer(number), generation, "the engine took the blocks", gone)
            self._words[rank].put(self._uses[number].blocks, FREE - 1)  # another request's bytes

    # --- the consumer ----------------------------------------------------------------------------------------------

    def _load(self, number: int, source: Source, cancelled: bool) -> None:
        blocks = self._lend(number)
        if blocks is None:
            return
        for rank, agent in enumerate(self.agents):
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
        self.agents[rank].fetch(Fetch(Handle(str(number)), _transfer(number), b"digest", source, table, 0, tokens, own))

    def _take(self, rank: int, event: Any) -> None:
        if isinstance(event, GenerationReleased):
            return  # a former generation's blocks: here they are others' from the revocation on
        number = event.transfer.prompt
        use = self._uses.get(number)
        if use is None:
            # An agent remembers ended transfers only for a while, so a process that was stopped for longer may hear of one twice.
            if self._stalls.since(time.monotonic() - 60) > self.config.lease:
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
        use.late_s = max(use.late_s, event.seconds - self.config.longest - self._stalls.since(use.begun))
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


class RankedWorld:
    """Engines in processes of their own, to which things happen only in ``turn``, ``kill`` and ``stop``.

    ``complaints`` lists the promises that did not hold.
    """

    def __init__(
        self,
        ranks: dict[str, int],
        blocks: int,
        rng: random.Random,
        config: dict[str, Any],
        device: str,
        hear: Callable[[str, LoadResult], None],
    ) -> None:
        """Start the engines.

        Args:
            ranks: Number of ranks of each engine, by name. Engines with "producer" in their name and the others start on different
                GPUs.
            blocks: Number of blocks of each engine. A transfer takes ``EACH``, and does not begin while fewer are free.
            rng: Source of their seeds.
            config: Their configuration, to which ``SETTINGS`` are added.
            device: ``cpu`` or ``cuda``.
            hear: Called with the engine's name and the result of each load.
        """
        self.complaints: list[str] = []
        self._ranks, self._blocks, self._rng, self._hear = ranks, blocks, rng, hear
        self._config = {**config, **SETTINGS}
        self._devices = cache_devices(device)
        self._numbers = 0
        self._remotes: dict[str, Remote] = {}
        self._sources: dict[str, Source] = {}
        self._starting: dict[str, float] = {}  # the time by which each has to run
        self._stopped: dict[str, float] = {}
        self._asked: set[str] = set()
        self._holding: dict[str, int] = {}
        self._todo: dict[str, tuple[list[Any], list[Any]]] = {}
        for name in ranks:
            self.start(name)
        for name in ranks:
            self._started(name)

    def start(self, name: str) -> None:
        """Start an engine, or the successor of one that was killed, without waiting until it runs, which takes seconds on a GPU."""
        devices = self._devices if "producer" in name else self._devices[::-1]
        of = name, self._ranks[name], self._blocks, self._rng.randrange(1 << 32), self._config, devices
        self._remotes[name] = Remote(name, RankedEngine, *of)
        self._remotes[name].send("source")
        self._starting[name] = time.monotonic() + START_S
        self._todo[name] = [], []

    def _started(self, name: str) -> None:
        self._sources[name] = self._remotes[name].get()
        del self._starting[name]

    def runs(self, name: str) -> bool:
        """Return whether an engine has started, and is neither stopped nor killed."""
        return name in self._remotes and name not in self._starting and name not in self._stopped

    def begin(
        self,
        producer: str,
        consumer: str,
        generations: int = 1,
        *,
        gone: bool = False,
        fetched: bool = True,
        cancelled: bool = False,
    ) -> int:
        """Begin a transfer, and return its number.

        Nothing begins if the consumer is still starting. If the producer is, the fetch goes to its predecessor.

        Args:
            producer: Name of the engine that offers it.
            consumer: Name of the engine that fetches it.
            generations: Number of generations that it goes through; if 0, it is never offered.
            gone: Whether the last generation is taken back in the end.
            fetched: Whether it is fetched at all.
            cancelled: Whether the fetch is cancelled at some time.
        """
        self._numbers += 1
        if consumer in self._starting:
            return self._numbers
        if generations and producer not in self._starting:
            self._todo[producer][0].append((self._numbers, generations, gone))
        if fetched:
            self._todo[consumer][1].append((self._numbers, self._sources[producer], cancelled))
        return self._numbers

    def turn(self) -> None:
        """Let every engine that runs work, and take in its results.

        Raises:
            KvxferError: An engine did not start, or died.
        """
        now = time.monotonic()
        for name in [name for name, until in self._stopped.items() if until <= now]:
            del self._stopped[name]
            self._remotes[name].resume()
        for name, remote in self._remotes.items():
            if name in self._starting and remote.ready(0):
                self._started(name)
            elif now >= self._starting.get(name, math.inf):
                raise KvxferError(f"the {name} did not start within {START_S:g} s")
            if name not in self._asked and self.runs(name):
                remote.send("step", *self._todo[name], TURN_S)
                self._todo[name] = [], []
                self._asked.add(name)
        time.sleep(TURN_S)
        for name in list(self._asked):
            if self._remotes[name].ready(ANSWER_S):
                self._take_in(name)

    def _take_in(self, name: str) -> None:
        results, complaints, self._holding[name] = self._remotes[name].get()
        self._asked.discard(name)
        self.complaints += complaints
        for v in results:
            if v.wrong:
                self.complaints.append(f"{name}: transfer {v.number} was delivered with wrong bytes: {v.wrong}")
            if v.late_s > LATE_S:
                self.complaints.append(
                    f"{name}: transfer {v.number} ended {v.late_s:.2f} s late ({v.kind}: {v.reason})"
                )
            self._hear(name, v)

    def vitals(self, name: str) -> dict[str, float]:
        """Return ``RankedEngine.vitals`` of an engine that runs."""
        if name in self._asked:
            self._take_in(name)
        found: dict[str, float] = self._remotes[name]("vitals")
        return found

    def stop(self, name: str, seconds: float) -> None:
        """Stop an engine that runs, for this many seconds."""
        self._remotes[name].stop()
        self._stopped[name] = time.monotonic() + seconds

    def kill(self, name: str) -> None:
        """Kill an engine that runs or is starting."""
        self._remotes.pop(name).kill()
        self._starting.pop(name, None)
        self._asked.discard(name)
        self._holding.pop(name, None)

    def rest(self) -> None:
        """Begin nothing more, and check that all blocks come back and every engine still answers."""
        self._stopped = dict.fromkeys(self._stopped, 0.0)
        self._todo = {name: ([], []) for name in self._ranks}
        until = time.monotonic() + REST_S
        while time.monotonic() < until:
            self.turn()
            if not self._asked and not any(self._holding.values()):
                return
        for name, n in self._holding.items():
            if n:
                self.complaints.append(f"{name}: {n} transfers still hold blocks {REST_S:g} s after the last began")
        for name in self._asked:
            self.complaints.append(f"{name}: it does not answer {REST_S:g} s after the last transfer began")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all engines; after an interrupt at once."""
        for name, remote in self._remotes.items():
            if name in self._stopped:
                remote.resume()
            remote.__exit__(kind)


def conclude(found: dict[str, Any], as_json: bool, text: str) -> None:
    """Print what a run has found, as JSON or as a text with the complaints; exit with 1 if there are any."""
    typer.echo(json.dumps(found) if as_json else "\n".join([text, *(f"wrong: {c}" for c in found["complaints"])]))
    if found["complaints"]:
        raise typer.Exit(1)


def counted(found: dict[str, int]) -> str:
    """Return how many there are of each kind, in words."""
    return ", ".join(f"{count} {kind}" for kind, count in found.items()) or "none"
