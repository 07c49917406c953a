"""Sizes, and numbers of runs, batches and links, that engines reach and tests seldom do."""

from __future__ import annotations

import numpy as np
import pytest

from kvxfer.geometry import Runs
from kvxfer.geometry.region import GAP, Region, flat_starts
from kvxfer.geometry.tensor import HOST
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import ParticipantLink, TransferMode
from kvxfer.testing.conformance.suite import Suite, World
from kvxfer.testing.participant import PERIOD, TAIL, Participant

MIB = 1 << 20
ROUND = (64 << 10, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
"""Sizes that buffers, slots and limits tend to have. Each is moved as it is, one byte shorter and one byte longer."""
MANY_RUNS, MANY_REGIONS, MANY_BATCHES, MANY_LINKS = 100_000, 250, 200, 40
HIGH = (2 << 30, 4 << 30)
"""The first flat offsets that do not fit 31 bits, or 32."""
LONG = (4 << 30) + 4096
"""A length of a run that does not fit 32 bits."""
LONG_S = 120.0
"""How long that may take."""
PIECE, PIECES = 64 * MIB, 34
"""What is moved over one link, in batches of one run or of many: more than 1 GiB, and than 2 GiB."""


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
        """One batch of a hundred thousand runs arrives whole.

        A prompt of 100,000 tokens has as many in a cache with blocks of one token. Cut the batch if your library has a limit.
        They lie in hundreds of regions, as those of a cache with a region for each layer.
        """
        a, b = world.local(), world.other()
        size, gap, each = 24, 32, MANY_RUNS // MANY_REGIONS
        for participant in (a, b):
            participant.allocate([each * gap + GAP * (i % 2) for i in range(MANY_REGIONS)], 5)
        starts = np.array(flat_starts(tuple(Region(1, each * gap + GAP * (i % 2)) for i in range(MANY_REGIONS))))
        link = world.link(a, b)
        order = np.random.default_rng(0)
        src, dst = (
            starts[places // each] + places % each * gap for places in (order.permutation(MANY_RUNS) for _ in range(2))
        )
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
        """Bytes at offsets beyond 31 and 32 bits are moved, on either side, and so is a run that begins before and ends behind them."""
        a, b = self._hosts(world)
        for participant in (a, b):
            participant.allocate_untouched([HIGH[-1] + 4 * MIB])
        link = world.link(a, b)
        data = np.random.default_rng(3).integers(1, 255, MIB, np.uint8)
        for way in self.ways():
            for high in HIGH:
                for src, dst in ((high + 17, high + 4097), (high - 5003, 3), (7, high - MIB // 2)):
                    a.write(0, src, data)
                    world.succeed(link.start(way, a, b, Runs.of([src], [dst], [MIB])))
                    found = b.read(0, dst - 1, MIB + 2)
                    assert_equal(found[1:-1], data, f"what came from {src} to {dst}")
                    assert not found[0] and not found[-1], "more arrived than was sent"
                    b.write(0, dst, np.zeros(MIB, np.uint8))
                    for low in (0, *HIGH):
                        assert not b.read(0, low, 2 * MIB).any(), f"bytes arrived {dst - low} bytes before their place"
                    data = data[::-1]

    @pytest.mark.slow
    def test_a_run_longer_than_four_gigabytes(self, world: World) -> None:
        """A run may be longer than a 32-bit number can say, and arrives to its last byte."""
        a, b = self._hosts(world)
        for participant in (a, b):
            participant.allocate_repeating(LONG + 8192)  # so that the run ends in bytes that are not repeated
        link = world.link(a, b)
        data = np.random.default_rng(4).integers(1, 255, PERIOD, np.uint8)
        tail = LONG + 8192 - TAIL
        a.write(0, 0, data)
        a.write(0, tail, data[: LONG - tail])
        ended = world.finish(link.start(self.ways()[0], a, b, Runs.of([0], [64], [LONG])), seconds=LONG_S)
        assert all(r.error is None for r in ended), ended
        assert_equal(b.read(0, 0, PERIOD), np.roll(data, 64), "what is repeated")
        assert_equal(b.read(0, tail + 64, LONG - tail), data[: LONG - tail], "the run's last bytes")
        assert not b.read(0, LONG + 64, 4096).any(), "more arrived than was sent"

    @pytest.mark.slow
    def test_gigabytes_over_one_link(self, world: World, way: TransferMode) -> None:
        """A link that has moved gigabytes moves the next bytes as well as the first: each is compared."""
        a, b = self._hosts(world)
        a.allocate([PIECE + MIB], 6)
        b.allocate_untouched([PIECE + MIB])
        link, content, order = world.link(a, b), a.content(0), np.random.default_rng(7)
        expected = b.content(0)
        for i in range(PIECES):
            places = order.permutation(PIECE // MIB) * MIB if i % 2 else np.zeros(1, np.int64)
            runs = Runs.of(places + 4097 * i, places[::-1] + 1001 * i, np.full(len(places), PIECE // len(places)))
            world.succeed(link.start(way, a, b, runs))
            expected = overlay(expected, content, runs)
            assert_equal(b.content(0), expected, f"the target's memory after {(i + 1) * PIECE >> 20} MiB")

    def _hosts(self, world: World) -> tuple[Participant, Participant]:
        """Make two participants, or skip the clause unless gigabytes are to be tried."""
        if self.memory != HOST or not self.gigabytes:
            pytest.skip("gigabytes are tried on the host, and once for a back end")
        return world.local(), world.other()
