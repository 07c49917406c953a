"""``kvxfer bench chaos``: engines of one and two ranks under kills, stops, preemptions and clients that leave.

Two producers and two consumers, of one rank and of two, exchange transfers in all pairs. Ranks lag behind each other;
producers take blocks back and compute them anew while they are read; engines are killed and started again, or stopped for
seconds. What must hold: every load ends once, in time; what is delivered is one generation, byte by byte, over all
ranks; all blocks come back, and nobody writes to them afterwards.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Annotated, Any

import typer

from kvxfer.bench.pair import cache_devices
from kvxfer.bench.ranked import LoadResult, RankedEngine
from kvxfer.bench.remote import Remote
from kvxfer.errors import ConfigError
from kvxfer.identity import Source

__all__ = ["chaos", "measure"]

ENGINES = {"producer-1": 1, "producer-2": 2, "consumer-1": 1, "consumer-2": 2}
"""Names, and how many ranks each has."""
TIMES = {"transfer_timeout": 6.0, "lease": 6.0, "peer_timeout": 2.0}
STEP_S, LOAD = 0.1, 3
"""Every so often, so many transfers begin between each producer and each consumer."""
LATE_S = 1.0
"""How long after its deadline an outcome may come, besides what the process did not run."""
REST_S = 2 * TIMES["transfer_timeout"] + 3 * TIMES["lease"]
"""When nothing more begins, all blocks are back within this time."""


class _Chaos:
    """The engines, and what happens to them."""

    def __init__(self, seed: int, config: dict[str, Any], device: str) -> None:
        self._rng = random.Random(seed)
        self._config = config
        self._devices = cache_devices(device)
        self._made = 0
        self.outcomes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.worst_late_s = 0.0
        self._numbers = 0
        self._remotes: dict[str, Remote] = {}
        self._sources: dict[str, Source] = {}
        self._stopped: dict[str, float] = {}
        self._asked: set[str] = set()
        self._holding: dict[str, int] = {}
        self._todo: dict[str, tuple[list[Any], list[Any]]] = {}
        for name in ENGINES:
            self._start(name)

    def _start(self, name: str) -> None:
        self._made += 1
        seed = self._rng.randrange(1 << 32)
        devices = self._devices if name.startswith("producer") else self._devices[::-1]
        self._remotes[name] = remote = Remote(name, RankedEngine, name, ENGINES[name], seed, self._config, devices)
        self._sources[name] = remote("source")
        self._todo[name] = [], []
        self._holding[name] = 0

    def begin(self) -> None:
        """Have transfers begin in all pairs."""
        for producer in ("producer-1", "producer-2"):
            for consumer in ("consumer-1", "consumer-2"):
                for _ in range(LOAD):
                    self._numbers += 1
                    generations = self._rng.choices((0, 1, 2, 3), (1, 10, 6, 3))[0]  # 0: never offered
                    if generations:
                        self._todo[producer][0].append((self._numbers, generations))
                    if self._rng.random() < 0.95:
                        load = self._numbers, self._sources[producer], self._rng.random() < 0.1
                        self._todo[consumer][1].append(load)

    def turn(self) -> None:
        """Let every engine work that runs, and take in what it says."""
        now = time.monotonic()
        for name in [name for name, until in self._stopped.items() if until <= now]:
            del self._stopped[name]
            self._remotes[name].resume()
        for name, remote in self._remotes.items():
            if name not in self._asked and name not in self._stopped:
                remote.send("step", *self._todo[name], STEP_S / 2)
                self._todo[name] = [], []
                self._asked.add(name)
        time.sleep(STEP_S / 2)
        for name in list(self._asked):
            if self._remotes[name].ready(STEP_S):
                self._asked.discard(name)
                self._hear(name, *self._remotes[name].get())

    def _hear(self, name: str, results: list[LoadResult], complaints: list[str], holding: int) -> None:
        self.complaints += complaints
        self._holding[name] = holding
        for v in results:
            self.outcomes[v.kind] += 1
            self.worst_late_s = max(self.worst_late_s, v.late_s)
            if v.wrong:
                self.complaints.append(f"{name}: transfer {v.number} was delivered wrong: {v.wrong}")
            if v.late_s > LATE_S:
                self.complaints.append(
                    f"{name}: transfer {v.number} ended {v.late_s:.2f} s late ({v.kind}: {v.reason})"
                )

    def harm(self) -> None:
        """Kill or stop an engine."""
        name = self._rng.choice(list(ENGINES))
        if name in self._stopped:
            return
        if self._rng.random() < 0.4:
            self.faults["killed"] += 1
            self._remotes[name].kill()
            self._asked.discard(name)
            self._start(name)
        else:
            self.faults["stopped"] += 1
            self._remotes[name].stop()
            self._stopped[name] = time.monotonic() + self._rng.uniform(0.05, 4.0)

    def rest(self) -> None:
        """Begin nothing more, and see that all blocks come back."""
        for name in list(self._stopped):
            self._stopped[name] = 0.0
        self._todo = {name: ([], []) for name in ENGINES}
        until = time.monotonic() + REST_S
        while time.monotonic() < until:
            self.turn()
            if not self._asked and not any(self._holding.values()):
                return
        for name, n in self._holding.items():
            if n:
                self.complaints.append(f"{name}: {n} transfers still hold blocks {REST_S:g} s after the last began")

    def close(self) -> None:
        for name, remote in self._remotes.items():
            if name in self._stopped:
                remote.resume()
            remote.close()


def measure(seconds: float, every: float, seed: int, config: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Run the engines under faults: kills and stops, ``every`` so many seconds on average, from a seed.

    Ranks of producers and of consumers begin at different GPUs, if ``device`` is ``cuda``.

    Returns:
        Outcomes by kind, faults by kind, the latest outcome in seconds past its deadline, and complaints: none if all
        promises held.
    """
    rng = random.Random(seed + 1)
    world = _Chaos(seed, {**config, **TIMES}, device)
    try:
        until = time.monotonic() + seconds
        harm = time.monotonic() + every
        while (now := time.monotonic()) < until:
            world.begin()
            world.turn()
            if now >= harm:
                world.harm()
                harm = time.monotonic() + rng.expovariate(1 / every)
        world.rest()
    finally:
        world.close()
    return {
        "seconds": seconds,
        "seed": seed,
        "outcomes": dict(world.outcomes),
        "faults": dict(world.faults),
        "worst_late_s": round(world.worst_late_s, 2),
        "complaints": world.complaints[:20],
    }


def chaos(
    minutes: Annotated[float, typer.Option(help="How long to run.", min=0.1)] = 5.0,
    every: Annotated[float, typer.Option(help="Mean seconds between two kills or stops.", min=0.1)] = 2.0,
    seed: Annotated[int, typer.Option(help="Of everything that is chosen.")] = 0,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    device: Annotated[str, typer.Option(help="Memory of the caches: cpu or cuda.")] = "cpu",
    integrity: Annotated[str, typer.Option(help="off, sample or full.")] = "full",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Kill, stop and preempt engines of one and two ranks; fails if a byte is wrong, a load late, a block lost."""
    if integrity not in ("off", "sample", "full"):
        raise ConfigError(f"--integrity is off, sample or full, not {integrity!r}")
    settings = {"backend": backend, "integrity": integrity, "staging_bytes": 4 << 20}
    found = measure(60 * minutes, every, seed, settings, device)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        typer.echo(f"outcomes: {found['outcomes']}")
        typer.echo(f"faults: {found['faults']}; the latest outcome came {found['worst_late_s']} s after its deadline")
        for complaint in found["complaints"]:
            typer.echo(f"wrong: {complaint}")
    if found["complaints"]:
        raise typer.Exit(1)
