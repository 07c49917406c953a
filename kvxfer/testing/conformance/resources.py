"""What a back end costs when nothing moves, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import time

from kvxfer.testing.conformance.harness import Suite, World
from kvxfer.testing.party import LocalParty, Runs

IDLE_S, IDLE_STRETCHES = 2.0, 5
IDLE_CPU = 0.03
RSS_SLACK = 16 << 20
"""Bytes by which memory may grow over all rounds: allocators keep some."""


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _resident() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Resources(Suite):
    def test_nothing_leaks(self, world: World) -> None:
        """After ``rounds`` of connecting, moving, disconnecting and closing, the process has the descriptors and
        threads it had after the first few, and about the memory. (Libraries keep a little for good on first use;
        that is fine.)"""
        way = self.ways()[0]

        def rounds(count: int) -> tuple[int, int, int]:
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
            gc.collect()
            return _descriptors(), _threads(), _resident()

        few = max(3, self.rounds // 20)
        descriptors, threads, resident = rounds(few)
        world.run(0.2)
        left = rounds(self.rounds - few)
        world.wait_for(lambda: _descriptors() <= descriptors, f"the release of {left[0] - descriptors} descriptors")
        world.wait_for(lambda: _threads() <= threads, f"the end of {left[1] - threads} threads")
        lost = (left[2] - resident) / self.rounds
        world.wait_for(lambda: _resident() - resident < RSS_SLACK, f"the release of {lost:.0f} bytes of memory a round")

    def test_links_do_not_leak(self, world: World) -> None:
        """The same for links that come and go while the transport stays."""
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

        few = max(3, self.rounds // 20)
        rounds(few)
        world.run(0.2)
        descriptors, threads, resident = _descriptors(), _threads(), _resident()
        rounds(self.rounds - few)
        world.wait_for(lambda: _descriptors() <= descriptors, "the release of descriptors")
        world.wait_for(lambda: _threads() <= threads, "the end of threads")
        grown = _resident() - resident
        assert grown < RSS_SLACK, f"{grown / self.rounds:.0f} bytes of memory were lost a link"

    def test_a_peer_that_came_too_early_leaves_nothing(self, world: World) -> None:
        """It has connected, and on this side the endpoint is withdrawn: what its coming has cost here is given back."""
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
        """Connected and with nothing to do, a transport and its threads use less than 3 % of a core: no thread
        spins, and ``fileno`` is readable only when there is something to do. The least of some stretches counts: a host
        that is busy with other work inflates what little there is."""
        a, b, link = world.pair()
        way = self.ways()[0]
        world.move(link, way, a, b, Runs.of([0], [0], [100_000]))
        world.run(0.3)
        used, here = 1.0, sum(isinstance(party, LocalParty) for party in (a, b))
        for _ in range(IDLE_STRETCHES):
            cpu, wall = time.process_time(), time.monotonic()
            while time.monotonic() < wall + IDLE_S:
                world.turn(0.5)
            used = min(used, (time.process_time() - cpu) / (time.monotonic() - wall) / here)
            if used < IDLE_CPU:
                break
        assert used < IDLE_CPU, f"an idle transport uses {used:.1%} of a core"
