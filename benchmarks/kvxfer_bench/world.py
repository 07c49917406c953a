"""Engines that exchange transfers while some of them are killed or stopped: for ``kvxfer bench chaos`` and ``kvxfer bench soak``.

What must hold, whatever is done to them: every load ends exactly once and in time; what is delivered belongs to one generation, byte
for byte, on all ranks; all blocks come back, and nobody writes to them afterwards.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Any

from kvxfer.errors import KvxferError
from kvxfer.identity import Source
from kvxfer.testing.remote import Remote
from kvxfer_bench.ranked import LoadResult, RankedEngine
from kvxfer_bench.transfer.pair import cache_devices

TIMES = {"transfer_timeout": 6.0, "lease": 6.0, "peer_timeout": 2.0}
TURN_S = 0.05
"""How long a turn takes, unless an engine answers late."""
ANSWER_S = 2 * TURN_S
"""How long a turn waits for an engine's answer."""
LATE_S = 1.0
"""How long after its deadline an outcome may come, not counting the time in which the process did not run."""
START_S = 180.0
"""How long an engine may take to start."""
REST_S = 2 * TIMES["transfer_timeout"] + 3 * TIMES["lease"]
"""Time in which all blocks must be back once nothing more begins."""


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
            blocks: Number of blocks of each engine. A transfer takes ``ranked.EACH``, and does not begin while fewer are free.
            rng: Source of their seeds.
            config: Their configuration, to which ``TIMES`` are added.
            device: ``cpu`` or ``cuda``.
            hear: Called with the engine's name and the result of each load.
        """
        self.complaints: list[str] = []
        self._ranks, self._blocks, self._rng, self._hear = ranks, blocks, rng, hear
        self._config = {**config, **TIMES}
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

    def close(self) -> None:
        """End all engines."""
        for name, remote in self._remotes.items():
            if name in self._stopped:
                remote.resume()
            remote.close()
