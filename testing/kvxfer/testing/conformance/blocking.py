"""Calls that take too long: one thread serves all links, so a call that blocks holds up all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from kvxfer.geometry import Runs
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.conformance.participant_link import PARTS, Part, ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.suite import SIZES, Suite, World
from kvxfer.testing.participant import LocalParticipant, Participant
from kvxfer.transport.contract import Transport

ATTEMPTS = 10
"""How often a step is repeated. The shortest of its longest calls counts, because a busy host may hold up a back end's threads."""

PIECE, PIECES = 16 << 10, 4096
LARGE_BYTES = PIECE * PIECES
_SRC, _DST = (np.random.default_rng(seed).permutation(PIECES) * PIECE for seed in (1, 2))
SCATTERED = Runs.of(_SRC, _DST, np.full(PIECES, PIECE))
WHOLE = Runs.of([0], [0], [LARGE_BYTES])
SMALL = Runs.of([3], [5], [1000])

NO_BATCH = 987_654
POLLS, POLLS_A_BATCH = 1000, 50
"""The polls that are timed in one step: enough for what happens in one of some hundreds to happen in every attempt."""

_METHODS = (
    "register",
    "deregister",
    "endpoint",
    "endpoint_lending",
    "connect",
    "withdraw",
    "submit",
    "poll",
    "abort",
    "lost",
    "disconnect",
)


class Took(NamedTuple):
    """How long a call took, and for how much of that its thread was computing, in seconds."""

    seconds: float
    computing: float

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s, {self.computing:.3f} s of it computing"


class CallTimes:
    """How long the calls of some transports have taken."""

    def __init__(self) -> None:
        self.longest: dict[str, Took] = {}
        self.count: Counter[str] = Counter()

    @contextmanager
    def of(self, transports: Iterable[Transport]) -> Iterator[CallTimes]:
        """Time all calls of these transports within the ``with`` block."""
        watched = list(transports)
        for transport in watched:
            for method in _METHODS:
                setattr(transport, method, self._timed(method, getattr(transport, method)))
        try:
            yield self
        finally:
            for transport in watched:
                for method in _METHODS:
                    delattr(transport, method)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            begun, computed = thread_clock(), time.thread_time()
            try:
                return method(*args, **named)
            finally:
                took = Took(thread_clock() - begun, time.thread_time() - computed)
                self.longest[name] = max(took, self.longest.get(name, took))
                self.count[name] += 1

        return call


class Blocking(Suite):
    """Clauses about how long calls take."""

    def test_no_call_blocks(self, world: World) -> None:
        """No method takes longer than ``capabilities.may_block_s``, however much there is to move.

        A batch of 64 MiB takes many calls of ``poll``, each of which moves some of it. Neither ``register`` nor
        ``connect`` waits for anybody, and not even one call in a hundred may take longer. Time for which the host has no
        processor for the thread does not count; time that it computes or waits does.
        """
        a, b = world.local(), world.other()
        for participant in (a, b):
            participant.allocate_untouched([LARGE_BYTES])
        here = [p for p in (a, b) if isinstance(p, LocalParticipant)]
        for participant in here:
            participant.write(0, 0, np.ones(LARGE_BYTES, np.uint8))
        link = world.link(a, b)

        def memory(calls: CallTimes) -> None:
            a.deregister(a.allocate(SIZES, 1))

        def links(calls: CallTimes) -> None:
            a.withdraw(a.endpoint())
            other = world.link(a, b)
            world.succeed(other.start(self.ways()[0], a, b, SMALL))
            assert a.transport.lost(other.peers[a.name]) is None
            for participant in (a, b):
                participant.disconnect(other.peers[participant.name])
            world.turn()

        def often(calls: CallTimes) -> None:
            for i in range(POLLS):
                if i % POLLS_A_BATCH == 0:
                    world.succeed(*(link.start(way, a, b, SMALL) for way in self.ways()))
                a.abort(NO_BATCH)  # does nothing, and poll is called after any other method
                world.turn(0)

        def alone(calls: CallTimes) -> None:
            idle = world.half_link(a, b)
            part = next(p for p in PARTS if p.way in self.ways())
            waiting = Started([(a, a.submit(idle.half(part, a, b, WHOLE)))])
            world.run(0.1)
            a.abort(waiting.halves[0][1])
            a.disconnect(idle.peers[a.name])
            world.finish(waiting)

        steps: dict[str, Callable[[CallTimes], None]] = {
            "memory is registered": memory,
            "links come and go": links,
            "small batches come and go": often,
        }
        for way in self.ways():
            for source, target in ((a, b), (b, a)):
                for what, runs in (("in one run", WHOLE), ("in runs of 16 KiB", SCATTERED)):
                    steps[f"{source.name} sends {target.name} 64 MiB {what} ({way.value})"] = _moving(
                        world, link, way, source, target, runs
                    )
        steps["a batch whose peer never connects is aborted"] = alone
        for what, step in steps.items():
            self._prompt(what, step, here)

    def test_no_call_blocks_when_the_peer_has_stopped(self, world: World) -> None:
        """No method waits for a peer that does not answer although its memory, its sockets and its network card are still there.

        ``may_block_s`` holds for such a peer too: for ``submit``, for ``poll``, and for ``abort`` and ``disconnect``, which are
        often the first to wait for an answer.
        """
        a, b = world.local(), world.mortal()
        for participant in (a, b):
            participant.allocate_untouched([LARGE_BYTES])
        for part in (p for p in PARTS if p.way in self.ways()):

            def step(calls: CallTimes, part: Part = part) -> None:
                link = world.link(a, b)
                world.succeed(link.start(part.way, *part.sides(a, b), SMALL))
                batches = link.halves(part.way, *part.sides(a, b), SCATTERED)
                for batch in [batch for participant, batch in batches if participant is b]:
                    b.submit(batch)
                b.stop()
                mine = next(batch for participant, batch in batches if participant is a)
                started = Started([(a, a.submit(mine))])
                world.run(0.1)
                a.abort(started.halves[0][1])
                world.run(0.02)
                a.disconnect(link.peers[a.name])
                world.finish(started)
                b.resume()
                b.disconnect(link.peers[b.name])

            self._prompt(f"a stopped peer has its part in a {part.way.value} as its {part.role}", step, [a])

    def _prompt(self, what: str, step: Callable[[CallTimes], object], here: Iterable[LocalParticipant]) -> None:
        """Check that no call in a step takes too long in the best of several attempts."""
        most = max(self.capabilities().may_block_s, 0.01)
        least: dict[str, Took] = {}
        for _ in range(ATTEMPTS):
            with CallTimes().of([p.transport for p in here]) as calls:
                step(calls)
            least = {name: min(took, least.get(name, took)) for name, took in calls.longest.items()}
            if all(took.seconds <= most for took in least.values()):
                return
        late = {name: str(took) for name, took in least.items() if took.seconds > most}
        raise AssertionError(f"calls may block for {most:g} s, and while {what} these took longer: {late}")


def _moving(
    world: World, link: ParticipantLink, way: TransferMode, source: Participant, target: Participant, runs: Runs
) -> Callable[[CallTimes], None]:
    return lambda calls: world.succeed(link.start(way, source, target, runs))
