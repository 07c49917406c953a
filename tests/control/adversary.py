"""Honest loads beside hostile and greedy peers, partitions, and a fleet at one directory.

A producer and a consumer are honest. In each case a load follows the other, alone and then beside an attack by a process that has the
key. The median load beside it may take twice its time alone. A case that exceeds this is measured once more. In some cases a new
consumer makes each load; otherwise one consumer makes loads for at least a second. Each process has 1,024 descriptors, as is usual.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvxfer.config import Config
from kvxfer.identity import Source, TransferBase, TransferId
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from tests.control.honest import BAIT, Fleet, HonestEngine, Prefill, limited
from tests.control.hostile import Hostile

RATIO, FLOOR_MS = 2.0, 25.0
"""How much longer the median load may take beside an attack. The ms that are added are the noise of a busy machine."""
LOAD_S = 60.0
"""The most seconds for one load."""
STRETCH_S = 1.0
"""The fewest seconds of loads before a median is taken: one pause of a busy machine outlasts several loads."""
SETTLE_S = 5.0
"""Seconds after which it is known of each link under a name of its own that it takes nothing."""
PER_PROCESS = 100
"""Directories of the fleet in one process."""
FLEET_S = 60.0
"""The most seconds until the whole fleet has asked, and until it has been told."""

Load = tuple[str, float, str]


class AttackedPair:
    """An honest producer and consumer, and what attacks them."""

    def __init__(self, stack: ExitStack, config: Config) -> None:
        self._stack, self._config, self._loads = stack, config, 0
        self.producer, self.consumer = self.engine("producer"), self.engine("consumer")
        self.source: Source = self.producer("source")

    def process(self, name: str, make: Callable[..., Any], *args: Any) -> Remote:
        """Make an object in a process of its own, which is closed in the end."""
        made = Remote(name, limited, make, *args)
        self._stack.callback(made.close)
        return made

    def engine(self, name: str) -> Remote:
        """Make an honest engine."""
        return self.process(name, HonestEngine, name, self._config)

    def hostile(self) -> Remote:
        """Make a hostile peer."""
        return self.process("hostile peer", Hostile, self._config)

    def cut_off(self, engine: Remote) -> None:
        """Have an engine get no time, and answer nothing, until the end."""
        engine.stop()
        self._stack.callback(engine.resume)

    def bait(self) -> None:
        """Have the producer offer what the greedy peer asks for."""
        self.producer("offer", BAIT, 1000)

    def offered(self, producer: Remote) -> TransferId:
        """Have a producer offer another transfer."""
        self._loads += 1
        transfer = TransferId(TransferBase("own/1/load"), self._loads)
        producer("offer", transfer)
        return transfer

    def loads(self, count: int) -> list[Load]:
        """Have at least ``count`` loads done, one after the other, for at least ``STRETCH_S``."""
        out: list[Load] = []
        until = time.monotonic() + STRETCH_S
        while len(out) < count or time.monotonic() < until:
            out.append(self.consumer("load", self.source, self.offered(self.producer), LOAD_S))
        return out

    def newcomers(self, count: int) -> list[Load]:
        """Have some loads done, each by a consumer that is new."""
        out = []
        for _ in range(count):
            new = Remote("newcomer", limited, HonestEngine, "newcomer", self._config)
            try:
                new.wait()
                out.append(new("load", self.source, self.offered(self.producer), LOAD_S))
            finally:
                new.close()
        return out


def _idle(world: AttackedPair) -> None:
    world.hostile()("idle", world.source, 1100)


def _half(world: AttackedPair) -> None:
    world.hostile()("half", world.source, 600)


def _reconnect(world: AttackedPair) -> None:
    world.hostile()("reconnect", world.source, 100, "127.0.0.2")
    time.sleep(SETTLE_S)


def _stall(world: AttackedPair) -> None:
    world.bait()
    world.hostile()("stall", world.source, BAIT, 40)


def _stall_under_many_names(world: AttackedPair) -> None:
    world.bait()
    world.hostile()("stall", world.source, BAIT, 40, 40)


def _stall_for_a_while(world: AttackedPair) -> None:
    _stall_under_many_names(world)
    time.sleep(SETTLE_S)


def _lie(world: AttackedPair) -> None:
    liar = world.hostile()
    world.consumer("begin", liar("lie", world.source, 3000), BAIT)


def _lie_a_little(world: AttackedPair) -> None:
    liar = world.hostile()
    world.consumer("begin", liar("lie", world.source, 200), BAIT)


def _notices(world: AttackedPair) -> None:
    world.hostile()("notices", world.source, 40)


def _questions(world: AttackedPair) -> None:
    world.hostile()("questions", world.source, 100)


def _partition(world: AttackedPair) -> None:
    other = world.engine("other producer")
    source, first, second = other("source"), world.offered(other), world.offered(other)
    world.consumer("load", source, first, LOAD_S)
    world.cut_off(other)
    world.consumer("begin", source, second)
    time.sleep(0.2)


CASES: dict[str, tuple[Callable[[AttackedPair], None], bool]] = {
    "1,100 idle connections at the directory": (_idle, True),
    "600 half handshakes at the directory": (_half, True),
    "100 connections from another address, each made again after its handshake": (_reconnect, True),
    "40 links that take no piece": (_stall, False),
    "40 links that take no piece, each under its own name": (_stall_under_many_names, False),
    "the same for five seconds, then beside consumers that come new": (_stall_for_a_while, True),
    "a directory of 3,000 ranks": (_lie, False),
    "a directory of 200 ranks that do not answer": (_lie_a_little, False),
    "notices without end, over 40 connections": (_notices, True),
    "questions whose answers are not read, over 100 connections": (_questions, True),
    "another producer that is cut off during a load": (_partition, False),
}
"""The attacks, and whether new consumers make the loads beside each."""


def _case(config: Config, attack: Callable[[AttackedPair], None], new: bool, count: int) -> dict[str, Any]:
    with ExitStack() as stack:
        world = AttackedPair(stack, config)
        loads = world.newcomers if new else world.loads
        world.loads(1)
        alone = loads(count)
        attack(world)
        beside = loads(count)
    ms = [round(statistics.median(each for _, each, _ in some), 1) for some in (alone, beside)]
    outcomes = Counter(outcome for outcome, _, _ in (*alone, *beside))
    return {
        "alone_ms": ms[0],
        "beside_ms": ms[1],
        "ratio": round(ms[1] / ms[0], 2),
        "longest_ms": round(max(each for _, each, _ in beside), 1),
        "outcomes": dict(outcomes),
        "words": sorted({words for _, _, words in (*alone, *beside) if words}),
    }


def loads_beside(case: str, count: int, folder: Path) -> set[str]:
    """Return how ``count`` loads ended beside an attack of ``CASES``, by TCP and where all have a key."""
    attack, new = CASES[case]
    with ExitStack() as stack:
        world = AttackedPair(stack, _config("tcp", folder))
        world.loads(1)
        attack(world)
        loads = world.newcomers if new else world.loads
        return {outcome for outcome, _, _ in loads(count)}


def _config(backend: str, folder: Path, keyed: bool = True) -> Config:
    make_key(folder / "key")
    return Config(
        backend=backend, staging_bytes=1 << 18, transfer_timeout=LOAD_S, lease=120.0, peer_timeout=15.0,
        key_file=str(folder / "key") if keyed else None,
    )  # fmt: skip


def _slow(case: dict[str, Any]) -> bool:
    """Return whether loads beside an attack take too long."""
    return bool(case["beside_ms"] > max(RATIO * case["alone_ms"], case["alone_ms"] + FLOOR_MS))


def measure_fleet(config: Config, engines: int) -> dict[str, Any]:
    """Have ``engines`` directories wait for one engine to begin, then have it begin."""
    transfer = TransferId(TransferBase("own/1/begun"), 0)
    with ExitStack() as stack:

        def process(name: str, make: Callable[..., Any], *args: Any) -> Remote:
            made = Remote(name, limited, make, *args)
            stack.callback(made.close)
            return made

        prefill = process("prefill engine", Prefill, config)
        sizes = [min(PER_PROCESS, engines - n) for n in range(0, engines, PER_PROCESS)]
        fleet = [process("fleet", Fleet, config, size) for size in sizes]
        source = prefill("source")
        for each in fleet:
            each.wait()
        began = time.monotonic()
        for each in fleet:
            each("ask", source, transfer)
        asked = prefill("asked", transfer, engines, FLEET_S)
        all_asked = time.monotonic()
        prefill("begin", transfer)
        for each in fleet:
            each.send("heard", source, transfer, FLEET_S)
        heard = [each.get() for each in fleet]
        return {
            "engines": engines,
            "asked": asked,
            "told": sum(told for told, _ in heard),
            "cut_off": sum(cut for _, cut in heard),
            "seconds_to_ask": round(all_asked - began, 2),
            "seconds_to_tell": round(time.monotonic() - all_asked, 2),
        }


def measure_attack(case: str, backend: str, keyed: bool, count: int) -> dict[str, Any]:
    """Measure at least ``count`` loads alone and beside an attack of ``CASES``; ``slow`` says whether they take too long beside it.

    ``keyed``: whether all have a key. A slow case is measured once more: a busy machine may be the cause.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = _config(backend, Path(folder), keyed)
        found = _case(config, *CASES[case], count)
        if set(found["outcomes"]) == {"delivered"} and _slow(found):
            found = min(found, _case(config, *CASES[case], count), key=_slow)
    return {**found, "slow": _slow(found)}
