"""Sizes, and numbers of runs, batches and links, that engines reach and tests seldom do."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import ParticipantLink, TransferMode
from kvxfer.testing.conformance.suite import Suite
from kvxfer.testing.conformance.world import World
from kvxfer.testing.participant import PERIOD, Participant, Runs

MIB = 1 << 20
ROUND = (64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Sizes that buffers, slots and limits tend to have. Each is moved as it is, one byte shorter and one byte longer."""
MANY_RUNS, MANY_BATCHES, MANY_LINKS = 100_000, 200, 40
HIGH = 4 << 30
"""The first flat offset that does not fit 32 bits."""
LONG = (4 << 30) + 4096
"""A length of a run that does not fit 32 bits."""
LONG_S = 120.0
"""How long that may take."""


class Volume(Suite):
    """Clauses about sizes and numbers."""

    def test_round_sizes(self, world: World, way: TransferMode) -> None:
        """Sizes that are powers of two, and their neighbours, arrive whole.

        A limit, slot or length field that is off by one shows here: look at what your back end does with a batch that
        fills it exactly.
        """
        a, b = world.local(), world.other()
        a.allocate([ROUND[-1] + MIB], 8)
        b.allocate_untouched([ROUND[-1] + MIB])
        link, content = world.link(a, b), a.content(0)
        for size in ROUND:
            for nbytes in (size - 1, size, size + 1):
                b.write(0, 0, np.zeros(nbytes + 100, np.uint8))
                world.succeed(link.start(way, a, b, Runs.of([5], [50], [nbytes])))
                found = b.read(0, 0, nbytes + 100)
                assert_equal(found[50 : 50 + nbytes], content[5 : 5 + nbytes], f"a run of {nbytes} bytes")
                assert not found[:50].any() and not found[50 + nbytes :].any(), f"{nbytes} bytes, and some beside them"

    def test_a_hundred_thousand_runs(self, world: World, way: TransferMode) -> None:
        """One batch of so many runs arrives whole.

        A prompt of 100,000 tokens has as many in a cache with blocks of one token. Cut the batch if your library has a limit.
        """
        a, b = world.local(), world.other()
        size, gap = 24, 32
        for participant in (a, b):
            participant.allocate([MANY_RUNS * gap], 5)
        link = world.link(a, b)
        order = np.random.default_rng(0)
        src, dst = (order.permutation(MANY_RUNS) * gap for _ in range(2))
        world.move(link, way, a, b, Runs.of(src, dst, np.full(MANY_RUNS, size)))

    def test_hundreds_of_equal_batches_at_once(self, world: World, way: TransferMode) -> None:
        """Batches of equal length that are in flight at once are not mixed up, although only their order tells them apart."""
        a, b, link = world.pair()
        expected, source = b.content(0), a.content(0)
        piece = 7000
        order = np.random.default_rng(1).permutation(MANY_BATCHES)
        pieces = [Runs.of([i * piece], [int(order[i]) * piece + 3], [piece]) for i in range(MANY_BATCHES)]
        started = [link.start(way, a, b, runs) for runs in pieces]
        world.succeed(*started)
        for runs in pieces:
            expected = overlay(expected, source, runs)
        assert_equal(b.content(0), expected, "the target's memory")

    def test_dozens_of_links_at_once(self, world: World, way: TransferMode) -> None:
        """One transport can have a link to each rank of each engine that it serves."""
        a, b = world.local(), world.other()
        world.allocate(a, b)
        links: list[ParticipantLink] = [world.link(a, b) for _ in range(MANY_LINKS)]
        expected, source = b.content(0), a.content(0)
        pieces = [Runs.of([i * 1000], [(MANY_LINKS - i) * 2000], [1000 + i]) for i in range(MANY_LINKS)]
        world.succeed(*(link.start(way, a, b, runs) for link, runs in zip(links, pieces, strict=True)))
        for runs in pieces:
            expected = overlay(expected, source, runs)
        assert_equal(b.content(0), expected, "the target's memory")

    @pytest.mark.slow
    def test_offsets_beyond_four_gigabytes(self, world: World) -> None:
        """Bytes at offsets beyond 32 bits are moved, and not those 4 GiB before them."""
        a, b = self._hosts(world)
        for participant in (a, b):
            participant.allocate_untouched([HIGH + 4 * MIB])
        link = world.link(a, b)
        data = np.random.default_rng(3).integers(1, 255, MIB, np.uint8)
        for way in self.ways():
            a.write(0, HIGH + 17, data)
            world.succeed(link.start(way, a, b, Runs.of([HIGH + 17], [HIGH + 4097], [MIB])))
            assert_equal(b.read(0, HIGH + 4097, MIB), data, "what lies beyond 4 GiB")
            assert not b.read(0, 0, 2 * MIB).any(), "bytes arrived 4 GiB before their place"
            data = data[::-1]

    @pytest.mark.slow
    def test_a_run_longer_than_four_gigabytes(self, world: World) -> None:
        """A run may be longer than a 32-bit number can say, and arrives to its last byte."""
        a, b = self._hosts(world)
        for participant in (a, b):
            participant.allocate_repeating(LONG + 8192)  # so that the run ends in bytes that are not repeated
        link = world.link(a, b)
        data = np.random.default_rng(4).integers(1, 255, 4096, np.uint8)
        for at in (0, PERIOD // 2, LONG - 4096):
            a.write(0, at, data)
        ended = world.finish(link.start(self.ways()[0], a, b, Runs.of([0], [64], [LONG])), seconds=LONG_S)
        assert all(r.error is None for r in ended), ended
        for at in (0, PERIOD // 2, LONG - 4096):
            assert_equal(b.read(0, at + 64, 4096), data, f"byte {at} and after it")
        assert not b.read(0, LONG + 64, 4096).any(), "more arrived than was sent"

    def _hosts(self, world: World) -> tuple[Participant, Participant]:
        """Make two participants, or skip the clause unless gigabytes are to be tried."""
        if self.memory != "cpu" or not self.gigabytes:
            pytest.skip("gigabytes are tried on the host, and once for a back end")
        return world.local(), world.other()
