"""Moving bytes: exactly the right ones, all of them, and when they can be relied on."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.geometry import Runs
from kvxfer.geometry.region import GAP
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.fences import CountedFence, HostFence
from kvxfer.testing.conformance.participant_link import Part, Started, TransferMode
from kvxfer.testing.conformance.suite import SIZES, Suite, World

SECOND = -(-SIZES[0] // GAP) * GAP + GAP
"""Flat offset of the second region."""


def _scattered(count: int, low: int, high: int, align: int = 1) -> Runs:
    """Return ``count`` runs of ``low`` to ``high`` bytes that do not overlap, in a different order on each side."""
    random = np.random.default_rng(count)
    lengths = random.integers(low, high + 1, count)
    slot = -(-high // align) * align
    room = min(SIZES[0] // slot, 4 * count)
    assert room >= count
    src, dst = (random.permutation(room)[:count] * slot for _ in range(2))
    if align == 1:
        src, dst = src + random.integers(0, slot - lengths + 1), dst + random.integers(0, slot - lengths + 1)
    return Runs.of(src, dst, lengths)


LAYOUTS = {
    "no runs": Runs.of([], [], []),
    "one byte": Runs.of([1], [2], [1]),
    "one odd run": Runs.of([1001], [77], [12_345]),
    "only empty runs": Runs.of([5, 0], [9, 0], [0, 0]),
    "empty runs between": Runs.of([0, 50, 100, SIZES[0]], [10, 0, 500, 3], [7, 0, 99, 0]),
    "a whole region": Runs.of([0], [0], [SIZES[0]]),
    "all regions": Runs.of([0, SECOND], [0, SECOND], SIZES),
    "across regions": Runs.of([0, SECOND + 3], [SECOND + 1, 11], [30_000, 50_001]),
    "equal runs": _scattered(500, 512, 512, align=512),
    "equal runs at odd places": _scattered(300, 333, 333, align=335),
    "thousands of short runs": _scattered(5000, 1, 64),
    "touching at the source": Runs.of([700, 800, 850, 900], [5000, 9000, 9200, 5100], [100, 50, 50, 9]),
    "touching at the target": Runs.of([5000, 9000, 9200, 5100], [700, 800, 850, 900], [100, 50, 50, 9]),
    "one source for several": Runs.of([300, 300, 320], [0, 5000, 9000], [1000, 1000, 1000]),
    "long and short": Runs.of([0, 2_000_000, 2_000_100], [1_000_001, 3, 500], [1_500_000, 90, 400_000]),
    "last byte": Runs.of([SECOND + SIZES[1] - 1], [SECOND + SIZES[1] - 1], [1]),
}


class Transfers(Suite):
    """Clauses about moving bytes."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_exactly_these_bytes(self, world: World, way: TransferMode, layout: str) -> None:
        """Every byte of every run arrives at its place, and no other byte of either side's memory changes.

        That holds for no run, one run and thousands of runs, of any length (zero included) and alignment, in any order, over
        several regions. Offsets are flat: map them with ``Memories.addresses``.
        """
        a, b, link = world.pair()
        world.move(link, way, a, b, LAYOUTS[layout])

    @pytest.mark.parametrize("layout", ["no runs", "one odd run", "thousands of short runs"])
    def test_every_batch_ends_once(self, world: World, way: TransferMode, layout: str) -> None:
        """Each batch that was accepted ends in one completion, on either side, whatever it moves.

        No further call is needed for that: look at what wakes your thread.
        """
        a, b, link = world.pair()
        for source, target in ((a, b), (b, a)):
            started = link.start(way, source, target, LAYOUTS[layout])
            world.promptly(started.over, "each accepted batch ends in one completion")
        world.run(0.05)  # a second completion would fail the test

    def test_many_at_once_both_ways(self, world: World, way: TransferMode) -> None:
        """Dozens of batches in flight, in both directions at once, end once each, and all bytes are right."""
        a, b, link = world.pair()
        before = a.content(0), b.content(0)
        piece, started, there, back = 40_000, [], [], []
        for i in range(32):
            # Halves of the memory, so that nothing is written while it is read.
            there.append(Runs.of([i * piece], [1_500_000 + (31 - i) * piece + 1], [piece - 1 - i]))
            back.append(Runs.of([i * piece + 2], [1_500_000 + i * piece], [piece - 2 - 100 * i]))
            started.append(link.start(way, a, b, there[-1]))
            started.append(link.start(way, b, a, back[-1]))
        world.succeed(*started)
        for runs in there:
            before = before[0], overlay(before[1], before[0], runs)
        for runs in back:
            before = overlay(before[0], before[1], runs), before[1]
        assert_equal(a.content(0), before[0], "the first side's memory")
        assert_equal(b.content(0), before[1], "the second side's memory")

    @pytest.mark.parametrize("first", ["source", "target"])
    def test_the_halves_may_come_in_either_order(self, world: World, way: TransferMode, first: str) -> None:
        """The other half may be submitted a while later.

        With one-sided verbs the peer does nothing at all.
        """
        a, b, link = world.pair()
        before, source = b.content(0), a.content(0)
        runs = Runs.of([0], [5], [2_000_000])
        halves = link.halves(way, a, b, runs)
        if first == "target":
            halves.reverse()
        started = Started()
        for participant, batch in halves:
            started.halves.append((participant, participant.submit(batch)))
            world.run(0.1)
        world.succeed(started)
        assert_equal(b.content(0), overlay(before, source, runs), "the target's memory")

    def test_streams_may_have_gaps(self, world: World) -> None:
        """Stream numbers rise, for each direction of a link by itself, and may begin anywhere below 2**62 and leave gaps of millions.

        Both halves have the same. They are no count of batches: compare them, and expect no next one. On a link that lives for
        days they get large.
        """
        if TransferMode.SEND not in self.ways():
            pytest.skip("only SEND and RECV have streams")
        a, b, link = world.pair()
        for streams in (
            {a.name: 7, b.name: 0},
            {a.name: 8, b.name: 1 << 40},
            {a.name: 1 << 41, b.name: (1 << 40) + (1 << 20)},
            {a.name: (1 << 62) - 2, b.name: 1 << 61},
        ):
            link.streams.update(streams)
            world.move(link, TransferMode.SEND, a, b, Runs.of([0], [9], [1000]))
            world.move(link, TransferMode.SEND, b, a, Runs.of([0], [5], [2000]))

    def test_complete_means_visible(self, world: World, way: TransferMode) -> None:
        """When any half completes, the bytes are in the target's memory.

        A reader that is told so, over any channel, may use them. It is not enough if a SEND completes when the bytes have left, or
        a WRITE while they are still in a cache.
        """
        a, b, link = world.pair()
        for i in range(20):
            a.fill(0, seed=1000 + i)
            runs = Runs.of([i], [2 * i], [500_000])
            expected = overlay(b.content(0), a.content(0), runs)
            started = link.start(way, a, b, runs)
            world.wait_for(started.begun_to_end, "a transfer")
            assert_equal(b.content(0), expected, "the target's memory at the first completion")
            world.succeed(started)

    def test_after_completion_the_source_is_free(self, world: World, way: TransferMode) -> None:
        """Once the source's half is complete, its memory may be overwritten at once.

        The source's half of a one-sided batch is the batch.
        """
        a, b, link = world.pair()
        runs = Runs.of([0], [0], [2_000_000])
        for i in range(5):
            a.fill(0, seed=i)
            expected = overlay(b.content(0), a.content(0), runs)
            started = link.start(way, a, b, runs)
            world.succeed(Started(started.halves[:1]))
            a.fill(0, seed=99)
            world.succeed(started)
            assert_equal(b.content(0), expected, "the target's memory")

    def test_nothing_is_touched_before_the_fence(self, world: World, way: TransferMode) -> None:
        """A half submitted with ``after`` neither reads nor writes its memory before the fence has passed, whatever else is in flight.

        It goes on by itself soon after: the back end must wake its thread to check (see ``Wakeup.at``). One that was aborted meanwhile
        does not.
        """
        a, b, link = world.pair()
        source, target = (b, a) if way is TransferMode.READ else (a, b)
        fenced = [a, b] if way is TransferMode.SEND and self.in_process else [a]
        for participant in fenced:
            runs, fence, other = Runs.of([0], [7], [100_000]), HostFence(), Runs.of([200_000], [200_000], [100_000])
            before = overlay(target.content(0), source.content(0), other)
            ahead = link.start(way, source, target, other)
            started = link.start(way, source, target, runs, fences={participant.name: fence})
            world.run(0.2)
            world.succeed(ahead)
            assert not started.over()
            assert_equal(target.content(0), before, "the target's memory before the fence")
            source.fill(0, seed=5)
            expected = overlay(before, source.content(0), runs)
            fence.open = True
            world.promptly(started.over, "a batch goes on by itself when its fence has passed")
            world.succeed(started)
            assert_equal(target.content(0), expected, "the target's memory after the fence")
        fence, runs = HostFence(), Runs.of([0], [7], [100_000])
        started = link.start(way, source, target, runs, fences={a.name: fence})
        for participant, number in started.halves:
            participant.abort(number)
        world.promptly(started.over, "a batch that waits for its fence can be aborted")
        results = world.finish(started)
        if all(world.make_quiet(participant, link, results) for participant, _ in started.halves):
            source.fill(0, seed=6)
            expected = target.content(0)
            fence.open = True
            if not a.closed:
                a.withdraw(a.endpoint())  # so that it is polled
            world.run(0.1)
            assert_equal(target.content(0), expected, "the target's memory after the fence of an aborted batch")

    def test_a_fence_passes_between_two_questions(self, world: World, part: Part) -> None:
        """A fence may pass at any moment, even between two checks in one ``poll``.

        A back end that checks once to begin the batch, and again to decide whether to come back, must not lose it in between.
        """
        a, b, link = world.pair()
        source, target = part.sides(a, b)
        for asks in range(4):
            runs, fence = Runs.of([0], [asks], [10_000]), CountedFence(asks)
            expected = overlay(target.content(0), source.content(0), runs)
            started = link.start(part.way, source, target, runs, fences={a.name: fence})
            world.promptly(started.over, "a batch goes on by itself when its fence has passed")
            world.succeed(started)
            assert_equal(target.content(0), expected, "the target's memory")

    def test_a_fence_does_no_harm_to_what_follows(self, world: World, part: Part) -> None:
        """Batches submitted after one that waits for its fence may wait with it or overtake it.

        They may have to wait because channels are ordered. All of them succeed, and the first is not forgotten.
        """
        a, b, link = world.pair()
        source, target = part.sides(a, b)
        pieces = [Runs.of([i * 10_000], [i * 10_000 + 7], [10_000]) for i in range(4)]
        expected = target.content(0)
        for runs in pieces:
            expected = overlay(expected, source.content(0), runs)
        fence = HostFence()
        started = [link.start(part.way, source, target, pieces[0], fences={a.name: fence})]
        world.run(0.05)
        started += [link.start(part.way, source, target, runs) for runs in pieces[1:]]
        world.run(0.05)
        assert not started[0].over()
        fence.open = True
        world.succeed(*started)
        assert_equal(target.content(0), expected, "the target's memory")
