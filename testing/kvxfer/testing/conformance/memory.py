"""Registered memory: what is accepted, what is refused, what is forgotten."""

from __future__ import annotations

import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.geometry.region import Region
from kvxfer.geometry.tensor import HOST
from kvxfer.memory import devices_of
from kvxfer.memory.registry import installed
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.participant_link import Part, ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.suite import SIZES, Suite, World
from kvxfer.testing.participant import Buffer

MANY = 260
"""Memories: more than a byte can number."""


class Memory(Suite):
    """Clauses about registered memory."""

    def test_memories_are_numbered_in_order(self, world: World) -> None:
        """The peer names a memory by its number: 0, 1, 2 ... in the order of registration, and no number is used twice."""
        participant = world.local()
        for number in range(MANY):
            assert participant.allocate([4096], number) == number
            if number > 1:
                participant.deregister(number)

    def test_the_number_of_a_memory_may_be_high(self, world: World, way: TransferMode) -> None:
        """Memory is moved by its number although hundreds were given back before it."""
        a, b = world.local(), world.other()
        for number in range(MANY):
            for participant in (a, b):
                participant.allocate([4096], number)
                if number > 1:
                    participant.deregister(number)
        for participant in (a, b):
            participant.allocate([100_000], MANY)
        link = world.link(a, b)
        for memory in (0, 1, MANY):
            world.move(link, way, a, b, Runs.of([9], [5], [4000]), memory, memory)

    def test_impossible_regions_are_refused(self, world: World) -> None:
        """A region without bytes or address, or on a device of an unknown kind, raises ``TransportError``."""
        transport, buffer = world.local().transport, Buffer(4096, self.device(0))
        for region in (
            Region(0, 4096, self.device(0)),
            Region(buffer.region.address, 0, self.device(0)),
            Region(buffer.region.address, -1, self.device(0)),
            Region(buffer.region.address, 4096, "abacus:0"),
        ):
            with pytest.raises(TransportError):
                transport.register([region])
        buffer.free()

    def test_kinds_that_are_not_declared_are_refused(self, world: World) -> None:
        """Memory of a kind that ``capabilities.memory`` does not name is refused when it is registered.

        Later only a fault would show it, or bytes from somewhere else.
        """
        transport, buffer = world.local().transport, Buffer(4096, self.device(0))
        for kind in {*installed(), "abacus"} - self.capabilities().memory:
            with pytest.raises(TransportError):
                transport.register([Region(buffer.region.address, 4096, kind if kind == HOST else f"{kind}:0")])
        buffer.free()

    def test_kinds_that_are_declared_are_moved(self, world: World, way: TransferMode) -> None:
        """Memory of every kind in ``capabilities.memory`` that this host has is moved, not only of the kind under test.

        ``probe`` says which kinds it could move here, and names none that the host lacks.
        """
        for kind in sorted(self.capabilities().memory):
            device = next(iter(devices_of(kind)), None)
            if device is None:
                assert kind not in self.backend.probe().memory, f"probe says that it moves {kind} memory; there is none"
            elif self.in_process or kind == self.memory:
                a, b = (world.local(device), world.local(device)) if self.in_process else (world.local(), world.other())
                world.allocate(a, b)
                world.move(world.link(a, b), way, a, b, Runs.of([9, 70_000], [0, 90_001], [60_000, 100]))

    def test_a_memory_may_be_empty(self, world: World) -> None:
        """A memory without regions is accepted and has a number, although nothing can be moved from it."""
        participant = world.local()
        assert participant.transport.register([]) == 0
        assert participant.allocate([4096], 1) == 1

    def test_overlapping_memories_work(self, world: World) -> None:
        """Two memories may share bytes (a cache, and a part of it).

        Within one memory regions must not overlap: such a memory is refused or works, but never gives wrong bytes.
        """
        participant, buffer = world.local(), Buffer(8192, self.device(0))
        base = buffer.region.address
        participant.transport.register([buffer.region])
        participant.transport.register([Region(base + 1024, 4096, self.device(0))])
        try:
            participant.transport.register([buffer.region, Region(base + 1024, 4096, self.device(0))])
        except TransportError:
            pass  # refusing is fine
        participant.close()
        buffer.free()

    def test_unknown_memory_is_refused(self, world: World, way: TransferMode) -> None:
        """A batch that names a local memory that was never registered raises ``TransportError`` from ``submit``."""
        a, b, link = world.pair()
        runs = Runs.of([0], [0], [10])
        for participant, batch in link.halves(way, a, b, runs, memory=7, target_memory=7):
            with pytest.raises(TransportError):
                participant.submit(batch)

    def test_offsets_outside_are_refused(self, world: World, way: TransferMode) -> None:
        """Local runs must lie inside one region of the registered memory.

        Those before it, behind it, in the gap between two regions, across the gap, or of negative or absurd length
        raise ``TransportError`` from ``submit``, and nothing is started.
        """
        a, b, link = world.pair()
        for bad_offset, length in (
            (-1, 10),
            (SIZES[0], 1),
            (SIZES[0] - 5, 10),
            (SIZES[0] - 5, 70_000),
            (1 << 40, 1),
            (0, -1),
            (10, 2**63 - 5),
            (0, SIZES[0] + 1),
        ):
            runs = Runs.of([0, bad_offset], [0, bad_offset], [1, length])
            for participant, batch in link.halves(way, a, b, runs):
                with pytest.raises(TransportError):
                    participant.submit(batch)
        world.move(link, way, a, b, Runs.of([0], [0], [100]))

    def test_remote_offsets_outside_fail(self, world: World, one_sided: TransferMode) -> None:
        """Batches whose remote runs leave the peer's memory end with an error, and move nothing.

        The error comes from ``submit`` or as their completion.
        """
        a, b, link = world.pair()
        before = a.content(0), b.content(0)
        for memory, offset in ((9, 0), (0, 1 << 40), (0, SIZES[0] - 5), (0, -1)):
            if one_sided is TransferMode.READ:
                halves = link.halves(one_sided, a, b, Runs.of([offset], [0], [10]), memory=memory)
            else:
                halves = link.halves(one_sided, a, b, Runs.of([0], [offset], [10]), target_memory=memory)
            [(participant, batch)] = halves
            try:
                started = Started([(participant, participant.submit(batch))])
            except TransportError:
                continue
            [result] = world.finish(started)
            assert result.error is not None
        assert_equal(a.content(0), before[0], "the source's memory")
        assert_equal(b.content(0), before[1], "the target's memory")

    def test_deregistered_memory_is_forgotten(self, world: World, way: TransferMode) -> None:
        """After ``deregister`` the number is refused, the memory may be freed, and other memories still work.

        Some libraries (NIXL for one) would use a stale registration and fault: check the number yourself.
        """
        a, b = world.local(), world.other()
        for participant in (a, b):
            participant.allocate([1 << 20], 1)
            participant.allocate([1 << 20], 2)
        link = world.link(a, b)
        world.move(link, way, a, b, Runs.of([5], [7], [100_000]))
        for participant in (a, b):
            participant.deregister(0)
        for participant, batch in link.halves(way, a, b, Runs.of([0], [0], [10])):
            with pytest.raises(TransportError):
                participant.submit(batch)
        with pytest.raises(TransportError):
            a.transport.deregister(0)
        with pytest.raises(TransportError):
            a.transport.deregister(5)
        world.move(link, way, a, b, Runs.of([5], [7], [100_000]), 1, 1)

    def test_memory_may_come_late(self, world: World, way: TransferMode) -> None:
        """Memory that is registered after the first endpoint was made is moved on links that are made later."""
        if self.backend.contract < 2:
            pytest.skip("contract 1 wants all memory registered before the first endpoint")
        a, b, link = world.pair()
        world.move(link, way, a, b, Runs.of([0], [0], [1000]))
        for participant in (a, b):
            try:
                assert participant.allocate(SIZES, 8) == 1
            except TransportError as e:
                pytest.fail(f"memory that comes late is refused: {e}")
        world.move(world.link(a, b), way, a, b, Runs.of([9, 70_000], [0, 90_001], [60_000, 100]), 1, 1)
        world.move(link, way, a, b, Runs.of([0], [0], [1000]))

    def test_memory_given_back_is_out_of_reach(self, world: World, one_sided: TransferMode) -> None:
        """Batches that a peer begins after ``deregister`` fail and touch nothing, because the memory may have been reused.

        They do not keep ``deregister`` from succeeding: this side need not know of them. If a network card or the kernel moves the
        bytes without asking anybody, the links have to be closed first (``revokes = False``).
        """
        owner, peer = world.local(), world.other()
        for participant in (owner, peer):
            for seed in (1, 2):
                participant.allocate([1 << 20], seed)
        link = world.link(owner, peer)
        source, target = (owner, peer) if one_sided is TransferMode.READ else (peer, owner)
        world.move(link, one_sided, source, target, Runs.of([5], [7], [100_000]))
        if not self.revokes:
            owner.disconnect(link.peers[owner.name])
        owner.give_back(0)
        world.run(0.3)
        before = owner.content(0)
        [(participant, batch)] = link.halves(one_sided, source, target, Runs.of([0], [9], [100_000]))
        ended = world.finish(world.submit(participant, batch))
        assert all(r.error is not None for r in ended), "a batch on memory that its owner has given back succeeded"
        assert_equal(owner.content(0), before, "memory that was given back")
        if self.revokes:
            world.move(link, one_sided, source, target, Runs.of([5], [7], [100_000]), 1, 1)

    def test_memory_that_was_not_lent_is_out_of_reach(self, world: World, one_sided: TransferMode) -> None:
        """If ``capabilities.lends`` is true, a peer reaches only the memories that ``endpoint_lending`` named, over this link.

        It writes to them only if that is allowed. Check the memory of each batch that you serve: a peer may ask for any.
        """
        if not self.capabilities().lends:
            pytest.skip("capabilities.lends is false")
        owner, peer = world.local(), world.other()
        for participant in (owner, peer):
            for seed in (1, 2):
                participant.allocate([1 << 20], seed)
        source, target = (owner, peer) if one_sided is TransferMode.READ else (peer, owner)
        writes = one_sided is TransferMode.WRITE
        runs = Runs.of([5], [7], [100_000])
        for lent in ([1], [0], []):
            for writable in (True, False):
                mine, theirs = owner.endpoint_lending(lent, writable), peer.endpoint()
                link = ParticipantLink({owner.name: owner.connect(mine, theirs), peer.name: peer.connect(theirs, mine)})
                for memory in (0, 1):
                    named = {"target_memory" if writes else "memory": memory}
                    if memory in lent and (writable or not writes):
                        world.move(link, one_sided, source, target, runs, **named)
                        continue
                    before = owner.content(memory), peer.content(0)
                    [(participant, batch)] = link.halves(one_sided, source, target, runs, **named)
                    ended = world.finish(world.submit(participant, batch))
                    assert all(r.error is not None for r in ended), "a batch on memory that was not lent succeeded"
                    assert_equal(owner.content(memory), before[0], "memory that was not lent")
                    assert_equal(peer.content(0), before[1], "the memory of the peer that was refused")

    def test_memory_in_use_cannot_be_deregistered(self, world: World, part: Part) -> None:
        """``deregister`` fails while a batch of this side uses the memory, and works once that has ended."""
        a, b = world.local(), world.other()
        world.allocate(a, b)
        link = world.half_link(a, b)  # so that nothing can end by itself
        started = Started([(a, a.submit(link.half(part, a, b, Runs.of([0], [0], [1000]))))])
        with pytest.raises(TransportError):
            a.transport.deregister(0)
        a.abort(started.halves[0][1])
        world.make_quiet(a, link, world.finish(started))
        if not a.closed:
            a.transport.deregister(0)
