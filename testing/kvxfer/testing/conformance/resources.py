"""What a back end costs while nothing moves, and what it leaves behind."""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable

import pytest

from kvxfer.geometry import Runs
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.fences import HostFence
from kvxfer.testing.conformance.participant_link import PARTS, Started, TransferMode
from kvxfer.testing.conformance.suite import SIZES, Suite, World
from kvxfer.testing.participant import LocalParticipant, Participant
from kvxfer.testing.usage import allocated, children, descriptors_open, old_objects_aside, resident, threads_running

IDLE_S, IDLE_STRETCHES = 2.0, 5
IDLE_CPU = 0.03
IDLE_TURNS = 200
"""How often in a second an idle transport may want to be polled. This finds a descriptor that is always readable on a host that
is too busy for it to use up ``IDLE_CPU``."""

RSS_SLACK, RSS_STRETCHES = 16 << 20, 5
"""Bytes by which memory may grow over all rounds, and the number of stretches into which these are divided."""

FENCE_CPU, FENCE_TURNS = 0.3, 4000
"""Share of a core, and polls a second, that waiting for a fence may take: one check every 0.5 ms makes 2,000 on an idle host."""

MAPPED = 2048
"""Bytes by which the memory in use may grow with each batch. A mapping that is kept is at least a page, twice as much; the jumps in
which allocators grow come to less for each batch."""
HEAP = 100
"""The same for what is allocated."""

POOL_S = 2.0
"""How long descriptors may take to close before more rounds have to show that it is no pool of connections that grew, but a leak."""

LINKS, LINK_STRETCHES = 40, 3
"""Links that end in one way, and how often: the stretch after which least is kept counts for all."""

ENDS_S, FORGETS_S = 0.2, 1.0
"""How long to wait until this side knows that its links have ended, and then until a back end has forgotten those it has closed."""


def _idle(world: World, transports: int) -> tuple[float, float]:
    """Measure what each transport uses while there is nothing to do: share of a core, and polls a second.

    Time in which a busy host keeps this thread waiting does not count, or a back end that spins would pass there.
    """
    cpu, began, turns = time.process_time(), thread_clock(), 0
    end = time.monotonic() + IDLE_S
    while time.monotonic() < end:
        world.turn(0.5)
        turns += 1
    lasted = (thread_clock() - began) * transports
    return (time.process_time() - cpu) / lasted, turns / lasted


def _least(world: World, transports: int, cpu: float, polls: float, stretches: int) -> tuple[float, float]:
    """Measure that until both are below what is allowed, at most ``stretches`` times; return the least of each."""
    used, turns = float("inf"), float("inf")
    for _ in range(stretches):
        stretch = _idle(world, transports)
        used, turns = min(used, stretch[0]), min(turns, stretch[1])
        if used < cpu and turns < polls:
            break
    return used, turns


def _lost(rounds: Callable[[int], object], count: int) -> int:
    """Return the bytes by which ``count`` rounds made the process grow.

    The median stretch of rounds is taken for all. A leak shows in each of them, while allocators and libraries grow in jumps
    (NCCL by 32 MiB, in the eighth round or the twentieth), and others in this process may give back much at one time.
    """
    stretches, grown = max(1, min(RSS_STRETCHES, count)), []
    for i in range(stretches):
        before = resident()
        rounds(count * (i + 1) // stretches - count * i // stretches)
        grown.append(resident() - before)
    return stretches * int(statistics.median(grown))


def _grown(work: Callable[[int], object], count: int) -> tuple[float, float]:
    """Return the bytes by which one of ``count`` pieces of work made the heaps (Python's and C's) and all memory in use grow."""
    heap, memory = allocated(), resident()
    work(count)
    return (allocated() - heap) / count, (resident() - memory) / count


def _abort(world: World, started: Started) -> None:
    """Abort a transfer that may have moved in part, and wait for its end."""
    participant, number = started.halves[0]
    participant.abort(number)
    world.finish(started)


def _objects() -> Counter[str]:
    """Count the objects that Python's collector knows, by their classes."""
    gc.collect()
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def _shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _unused(files: set[str]) -> set[str]:
    """Return the files in shared memory that no other living process has mapped, such as tests that run at the same time."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if not files:
            break
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as f:
            maps = f.read()
            files = {name for name in files if f"/dev/shm/{name}" not in maps or int(pid) == os.getpid()}
    return files


class Resources(Suite):
    """Clauses about what a back end costs and leaves behind."""

    @old_objects_aside()
    def test_nothing_leaks(self, world: World) -> None:
        """After many rounds of connecting, moving and closing, descriptors, threads and memory are what they were.

        They are compared with the state after the first few of ``rounds``, because libraries may keep a little for ever on
        first use.
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
                    inner.move(link, way, a, b, Runs.of([0], [5], [5000]))
                    if i % 2:
                        a.disconnect(link.peers[a.name])
                finally:
                    inner.close()

        self._stays(world, rounds, "a round")

    @old_objects_aside()
    def test_links_do_not_leak(self, world: World) -> None:
        """Links that come and go while the transport stays leave nothing behind either.

        Every second one is closed with a batch that was aborted.
        """
        way = self.ways()[0]
        a, b = world.local(), world.other()
        world.allocate(a, b)
        content = a.content(0)

        def rounds(count: int) -> None:
            for i in range(count):
                link = world.link(a, b)
                world.succeed(link.start(way, a, b, Runs.of([i], [5], [5000])))
                assert_equal(b.read(0, 5, 5000), content[i : i + 5000], f"what came over link {i}")
                if i % 2:
                    _abort(world, link.start(way, a, b, Runs.of([0], [5], [5000])))
                a.disconnect(link.peers[a.name])
                b.disconnect(link.peers[b.name])
                world.turn()
                world.run(self.closing_s)

        self._stays(world, rounds, "a link")

    @pytest.mark.parametrize("end", ["peer closed", "aborted", "never made"])
    @old_objects_aside()
    def test_links_that_have_ended_do_not_leak(self, world: World, end: str) -> None:
        """A link that has ended before it is closed here leaves nothing behind either.

        The peer has closed it, a batch on it was aborted, or it never was made. Do not wait for an event before you forget it:
        there may be none to come.
        """
        a, b = world.local(), world.other()
        world.allocate(a, b)
        self._kept_of_links(world, a, b, end, 0.0)  # what is kept on first use
        descriptors, threads = descriptors_open(), threads_running()
        kept: list[Counter[str]] = []
        while len(kept) < LINK_STRETCHES and min(map(Counter.total, kept), default=LINKS) >= LINKS // 2:
            kept.append(self._kept_of_links(world, a, b, end, FORGETS_S))
        least = min(kept, key=Counter.total)
        by_use = sorted(least, key=lambda name: (name.startswith(("builtins.", "collections.")), -least[name]))
        what = ", ".join(f"{least[name]} {name}" for name in by_use[:5])
        assert least.total() < LINKS // 2, f"of {LINKS} links that had ended ({end}) these objects are kept: {what}"
        self._no_more(world, descriptors, threads)

    def _kept_of_links(
        self, world: World, a: LocalParticipant, b: Participant, end: str, seconds: float
    ) -> Counter[str]:
        """Have links end and close them; return the objects that are kept of them, after ``seconds`` at the latest."""
        before = _objects()
        self._end_links(world, a, b, end)
        until = time.monotonic() + seconds
        while (kept := _objects() - before).total() >= LINKS // 2 and time.monotonic() < until:
            world.turn()
        return kept

    def _end_links(self, world: World, a: LocalParticipant, b: Participant, end: str) -> None:
        """Have ``LINKS`` links end in one way, then close them."""
        theirs = [b.endpoint() for _ in range(LINKS)] if end == "never made" else []
        links = [] if theirs else [world.link(a, b) for _ in range(LINKS)]
        peers = [link.peers[a.name] for link in links] or [a.connect(a.endpoint(), endpoint) for endpoint in theirs]
        can, until = self.capabilities(), time.monotonic() + ENDS_S
        if end == "aborted":
            part = next(p for p in PARTS if p.way in self.ways())
            started = [world.submit(a, link.half(part, a, b, Runs.of([0], [5], [5000]))) for link in links]
            for begun in started:
                for _, number in begun.halves:
                    a.abort(number)
            world.finish(*started)
            if can.quiet == "later":
                world.wait_for(a.quiet, "the quiet of what was aborted")
            a.forget()
            until = 0.0 if can.abort == "batch" else until  # then the links have not ended
        elif end == "peer closed":
            for link in links:
                b.disconnect(link.peers[b.name])
        for endpoint in theirs:
            b.withdraw(endpoint)
        while any(a.transport.lost(peer) is None for peer in peers) and time.monotonic() < until:
            world.turn()
        for peer in peers:
            a.disconnect(peer)
        for link in links:
            b.disconnect(link.peers[b.name])
        world.turn()
        world.run(self.closing_s)

    @old_objects_aside()
    def test_batches_do_not_leak(self, world: World) -> None:
        """Thousands of batches on one link leave nothing behind, whether they end well or are aborted.

        No entry of a table, buffer, mapping or Python object may stay: an engine moves millions of batches.
        """
        a, b, link = world.pair()
        way, can, content = self.ways()[0], self.capabilities(), a.content(0)
        aborts = can.abort == "batch" and can.quiet in ("batch", "later")  # others need a new link after it

        def batches(count: int) -> None:
            for i in range(0, count, 8):
                started = [link.start(way, a, b, Runs.of([i + 3 * j], [3000 * j], [3000])) for j in range(8)]
                if aborts:
                    _abort(world, started.pop())
                world.succeed(*started)
                found = b.read(0, 0, 3000 * len(started)).reshape(-1, 3000)
                for j, piece in enumerate(found):
                    assert_equal(piece, content[i + 3 * j : i + 3 * j + 3000], f"what batch {i + j} brought")
            for participant in (a, b):
                if isinstance(participant, LocalParticipant):
                    world.wait_for(participant.quiet, "the quiet of what was aborted")
                    participant.forget()

        batches(400)
        grown = [_grown(batches, 800) for _ in range(3)]
        heap, memory = (statistics.median(column) for column in zip(*grown, strict=True))
        assert heap < HEAP, f"{heap:.0f} bytes of memory are lost a batch"
        assert memory < MAPPED, f"{memory:.0f} bytes of mapped memory are lost a batch"

    @old_objects_aside()
    def test_a_refused_batch_leaves_nothing_behind(self, world: World, one_sided: TransferMode) -> None:
        """A batch that names memory or bytes that the peer has not fails by an error that names the peer, and moves nothing.

        Not even those of its runs that are good move. Nothing is kept of it, and the link goes on, or another one if ``lost`` says so;
        batches before and after it succeed.
        """
        a, b, link = world.pair()
        c = world.other()
        c.allocate(SIZES, 9)
        other = world.link(a, c)
        source, target = (b, a) if one_sided is TransferMode.READ else (a, b)
        where = "src" if one_sided is TransferMode.READ else "dst"
        before = target.content(0)
        good = Runs.of([100], [1_000_000], [500_000])
        wanted, quiet = overlay(before, source.content(0), good), self.capabilities().quiet

        def rounds(count: int) -> None:
            nonlocal link
            for i in range(count):
                named, bad = {}, Runs.of([7, 50], [2_000_000, 2_100_000], [50_000, 9])
                if i % 2:
                    named["memory" if where == "src" else "target_memory"] = 77
                else:
                    getattr(bad, where)[1] = (SIZES[0] - 5, -1, 1 << 40)[i // 2 % 3]
                first = link.start(one_sided, source, target, good)
                [(_, batch)] = link.halves(one_sided, source, target, bad, **named)
                refused = world.submit(a, batch)
                last = link.start(one_sided, source, target, good)
                for result in world.finish(refused):
                    assert result.error is not None and b.name in result.error, f"a refused batch ended with {result}"
                    assert result.quiet or quiet != "batch", "a failed batch is not quiet"
                ended = world.finish(first, last)
                if a.transport.lost(link.peers[a.name]) is not None:
                    for participant in (a, b):
                        participant.disconnect(link.peers[participant.name])
                    link = world.link(a, b)
                    ended = world.finish(link.start(one_sided, source, target, good))
                assert all(r.error is None for r in ended), f"beside a batch that was refused others fail: {ended}"
                if quiet == "later":
                    world.wait_for(a.quiet, "the quiet of what was refused")
                a.forget()

        self._stays(world, rounds, "a batch that was refused")
        assert_equal(target.content(0), wanted, "the target's memory")
        source, target = (c, a) if one_sided is TransferMode.READ else (a, c)
        world.move(other, one_sided, source, target, Runs.of([0], [9], [1000]))

    def test_nothing_is_left_in_the_system(self, world: World) -> None:
        """When both sides have closed, no file of theirs is left in shared memory, and no child process."""
        files, started = _shared_files(), children()
        for _ in range(3):
            a, b, link = world.pair()
            world.move(link, self.ways()[0], a, b, Runs.of([0], [0], [1_000_000]))
            a.close()
            b.close()
        world.promptly(lambda: not children() - started, "the side that closes ends the processes that it has started")
        world.promptly(
            lambda: not _unused(_shared_files() - files), "the side that closes leaves no file in shared memory"
        )

    def test_waiting_for_a_fence_does_not_spin(self, world: World) -> None:
        """A fence is checked now and then, not all the time.

        An engine's forward pass takes milliseconds, and needs the processor.
        """
        a, b, link = world.pair()
        part, fence = next(p for p in PARTS if p.way in self.ways()), HostFence()
        started = link.start(part.way, *part.sides(a, b), Runs.of([0], [0], [1000]), fences={a.name: fence})
        world.run(0.2)
        used, turns = _least(world, 1, FENCE_CPU, FENCE_TURNS, 3)
        fence.open = True
        world.succeed(started)
        assert used < FENCE_CPU, f"waiting for a fence uses {used:.0%} of a core"
        assert turns < FENCE_TURNS, f"waiting for a fence takes {turns:.0f} polls a second"

    def _stays(self, world: World, rounds: Callable[[int], None], what: str) -> None:
        """Check that descriptors, threads and memory stay what they are after the first few rounds."""
        few = max(3, self.rounds // 20)
        rounds(few)
        gc.collect()  # else descriptors of garbage would count as open before
        world.run(0.2)
        descriptors, threads = descriptors_open(), threads_running()
        lost = _lost(rounds, self.rounds - few)
        if not world.comes(lambda: descriptors_open() <= descriptors, POOL_S):
            descriptors = descriptors_open()
            rounds(self.rounds - few)
        self._no_more(world, descriptors, threads)
        assert lost < RSS_SLACK, f"{lost / self.rounds:.0f} bytes of memory were lost {what}"

    def _no_more(self, world: World, descriptors: int, threads: int) -> None:
        """Check that there are soon no more descriptors and threads than before."""
        world.promptly(
            lambda: descriptors_open() <= descriptors, f"no more descriptors stay open than the {descriptors} before"
        )
        world.promptly(lambda: threads_running() <= threads, f"no more threads stay than the {threads} before")

    def test_a_peer_that_came_too_early_leaves_nothing(self, world: World) -> None:
        """If a peer connects to an endpoint that is then withdrawn, everything that this took is given back."""
        a, b, _ = world.pair()
        world.run(0.3)
        descriptors = descriptors_open()
        for _ in range(20):
            mine, theirs = a.endpoint(), b.endpoint()
            early = b.connect(theirs, mine)
            world.run(0.01)
            a.withdraw(mine)
            b.disconnect(early)
        world.promptly(
            lambda: descriptors_open() <= descriptors, f"no more descriptors stay open than the {descriptors} before"
        )

    def test_idle_costs_nothing(self, world: World) -> None:
        """A connected transport with nothing to do uses less than 3 % of a core and 200 polls a second, and then goes on.

        No thread spins, and ``fileno`` is readable only when there is something to do. The least of several measurements
        counts, because other work on the host inflates them.
        """
        a, b, link = world.pair()
        way = self.ways()[0]
        world.move(link, way, a, b, Runs.of([0], [0], [100_000]))
        world.run(0.3)
        here = sum(isinstance(participant, LocalParticipant) for participant in (a, b))
        used, turns = _least(world, here, IDLE_CPU, IDLE_TURNS, IDLE_STRETCHES)
        assert used < IDLE_CPU, f"an idle transport uses {used:.1%} of a core"
        assert turns < IDLE_TURNS, f"an idle transport wants to be polled {turns:.0f} times a second"
        world.move(link, way, a, b, Runs.of([0], [9], [100_000]))
        world.move(link, way, b, a, Runs.of([0], [9], [100_000]))
