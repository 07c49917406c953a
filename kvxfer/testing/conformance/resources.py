"""What a back end costs when nothing moves, and what it leaves behind."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable

from kvxfer.testing.conformance.harness import Suite, World
from kvxfer.testing.participant import LocalParticipant, Runs

IDLE_S, IDLE_STRETCHES = 2.0, 5
IDLE_CPU = 0.03
IDLE_TURNS = 200
"""How often in a second an idle transport may want to be polled. It shows a descriptor that is always readable where a
loaded host leaves us too little of a processor to use ``IDLE_CPU`` of it."""

RSS_SLACK, RSS_STRETCHES = 16 << 20, 3
"""Bytes by which memory may grow over all rounds, seen in that many stretches of them."""

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _resident() -> int:
    """Return the bytes of memory in use.

    Garbage, and what was freed and is kept by the allocator, is given back first: a leak would be served from there,
    and would not show.
    """
    gc.collect()
    if _trim is not None:
        _trim(ctypes.c_size_t(0))
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _idle(world: World, transports: int) -> tuple[float, float]:
    """Measure what each transport uses while there is nothing to do: share of a core, and polls a second."""
    cpu, start, turns = time.process_time(), time.monotonic(), 0
    while time.monotonic() < start + IDLE_S:
        world.turn(0.5)
        turns += 1
    lasted = (time.monotonic() - start) * transports
    return (time.process_time() - cpu) / lasted, turns / lasted


def _lost(rounds: Callable[[int], object], count: int) -> int:
    """Return the bytes by which ``count`` rounds made the process grow.

    The stretch of rounds that added least stands for all. A leak is in each of them, while allocators and libraries
    grow in jumps (NCCL by 32 MiB, in the eighth round or the twentieth).
    """
    grown = []
    for i in range(RSS_STRETCHES):
        before = _resident()
        rounds(count * (i + 1) // RSS_STRETCHES - count * i // RSS_STRETCHES)
        grown.append(_resident() - before)
    return RSS_STRETCHES * min(grown)


class Resources(Suite):
    """Clauses about what a back end costs and leaves behind."""

    def test_nothing_leaks(self, world: World) -> None:
        """After many rounds of connecting, moving and closing, descriptors, threads and memory are what they were.

        They are compared with the state after the first few of ``rounds``, since libraries keep a little for good on
        first use. That is fine.
        """
        way = self.ways()[0]

        def rounds(count: int) -> None:
            for i in range(count):
                inner = World(self)
                try:
                    a, b = inner.local(), inner.other()
                    a.allocate([10_000], i)
                    b.allocate([10_000], i)
                    link = inner.link(a, b)
                    inner.succeed(link.start(way, a, b, Runs.of([0], [5], [5000])))
                    if i % 2:
                        a.disconnect(link.peers[a.name])
                finally:
                    inner.close()

        self._stays(world, rounds, "a round")

    def test_links_do_not_leak(self, world: World) -> None:
        """Links that come and go while the transport stays leave nothing behind either."""
        way = self.ways()[0]
        a, b = world.local(), world.other()
        world.allocate(a, b)

        def rounds(count: int) -> None:
            for _ in range(count):
                link = world.link(a, b)
                world.succeed(link.start(way, a, b, Runs.of([0], [5], [5000])))
                a.disconnect(link.peers[a.name])
                b.disconnect(link.peers[b.name])
                world.turn()
                world.run(self.closing_s)

        self._stays(world, rounds, "a link")

    def _stays(self, world: World, rounds: Callable[[int], None], what: str) -> None:
        """Check that descriptors, threads and memory stay what they are after the first few rounds."""
        few = max(3, self.rounds // 20)
        rounds(few)
        gc.collect()  # or descriptors of garbage would count as what was there before
        world.run(0.2)
        descriptors, threads = _descriptors(), _threads()
        lost = _lost(rounds, self.rounds - few)
        world.wait_for(lambda: _descriptors() <= descriptors, "the release of descriptors")
        world.wait_for(lambda: _threads() <= threads, "the end of threads")
        assert lost < RSS_SLACK, f"{lost / self.rounds:.0f} bytes of memory were lost {what}"

    def test_a_peer_that_came_too_early_leaves_nothing(self, world: World) -> None:
        """What it cost that a peer connected to an endpoint which is then withdrawn is given back."""
        a, b, _ = world.pair()
        world.run(0.3)
        descriptors = _descriptors()
        for _ in range(20):
            mine, theirs = a.endpoint(), b.endpoint()
            early = b.connect(theirs, mine)
            world.run(0.01)
            a.transport.withdraw(mine)
            b.disconnect(early)
        world.wait_for(lambda: _descriptors() <= descriptors, "the release of descriptors")

    def test_idle_costs_nothing(self, world: World) -> None:
        """A connected transport with nothing to do uses less than 3 % of a core and 200 polls a second.

        No thread spins, and ``fileno`` is readable only when there is something to do. The least of some stretches
        counts: a host that is busy with other work inflates what little there is.
        """
        a, b, link = world.pair()
        way = self.ways()[0]
        world.move(link, way, a, b, Runs.of([0], [0], [100_000]))
        world.run(0.3)
        used, turns, here = 1.0, float("inf"), sum(isinstance(participant, LocalParticipant) for participant in (a, b))
        for _ in range(IDLE_STRETCHES):
            stretch = _idle(world, here)
            used, turns = min(used, stretch[0]), min(turns, stretch[1])
            if used < IDLE_CPU and turns < IDLE_TURNS:
                break
        assert used < IDLE_CPU, f"an idle transport uses {used:.1%} of a core"
        assert turns < IDLE_TURNS, f"an idle transport wants to be polled {turns:.0f} times a second"
