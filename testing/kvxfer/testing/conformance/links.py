"""Links: how they begin, which endpoints are refused, and how links are closed."""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import replace

import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import Part, ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.suite import Suite, World
from kvxfer.testing.usage import old_objects_aside
from kvxfer.transport.contract import MAX_ENDPOINT

LARGE = Runs.of([0], [0], [3_000_000])


class Links(Suite):
    """Clauses about links between two transports."""

    def test_endpoints_are_fresh_and_small(self, world: World) -> None:
        """Each call of ``endpoint`` describes one future link.

        It has at most 1 MiB, because it is sent inside a hello.
        """
        participant = world.local()
        world.allocate(participant)
        endpoints = [participant.endpoint() for _ in range(5)]
        assert len(set(endpoints)) == 5
        assert all(isinstance(e, bytes) and 0 < len(e) <= MAX_ENDPOINT for e in endpoints)

    @old_objects_aside()
    def test_a_withdrawn_endpoint_is_forgotten(self, world: World, way: TransferMode) -> None:
        """Nothing is kept of a withdrawn endpoint: an agent that dials peers that never answer makes endpoints for ever.

        It may be forgotten as late as in the ``poll`` that follows. ``withdraw`` ignores an endpoint that was
        connected, or withdrawn before.
        """
        a, b = world.local(), world.other()
        world.allocate(a, b)
        mine, theirs = a.endpoint(), b.endpoint()
        link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})

        def blocks_after(count: int) -> int:
            for _ in range(count):
                unused = a.endpoint()
                for endpoint in (unused, unused, mine):
                    a.withdraw(endpoint)
                world.turn(0)
            gc.collect()  # garbage that is not collected yet does not count as kept
            return sys.getallocatedblocks()

        blocks_after(100)
        kept = -blocks_after(100) + blocks_after(1000)
        assert kept < 1000, f"{kept} blocks of Python's memory are kept of 1000 endpoints"
        world.move(link, way, a, b, Runs.of([0], [0], [1000]))

    def test_malformed_endpoints_are_refused(self, world: World, way: TransferMode) -> None:
        """Bytes that are not an endpoint raise ``TransportError``; an altered endpoint is refused, or its batches fail.

        Neither harms the transport. Endpoints come from the network: never unpickle them.
        """
        a, b, link = world.pair()
        good = b.endpoint()
        for bad in (b"", b"\0" * 64, b"\xff" * 64, b"hello", good[: len(good) // 2], good[:-1]):
            with pytest.raises(TransportError):
                a.connect(a.endpoint(), bad)
            with pytest.raises(TransportError):
                a.connect(bad, b.endpoint())
        dice = random.Random(1)
        for _ in range(20):
            altered = bytearray(b.endpoint())
            altered[dice.randrange(len(altered))] ^= 1 << dice.randrange(8)
            try:
                peer = a.connect(a.endpoint(), bytes(altered))
            except TransportError:
                continue
            world.turn()
            a.disconnect(peer)
        world.move(link, way, a, b, Runs.of([0], [0], [1000]))
        world.move(link, way, b, a, Runs.of([0], [0], [1000]))

    def test_an_endpoint_opens_its_own_link_only(self, world: World, part: Part) -> None:
        """A peer with another endpoint of this side gains nothing by it, and cannot take the place of the expected peer.

        Look at how you identify incoming connections: go by the secret of the one endpoint that was given to ``connect``, not
        by which comes first, nor by the peer's name or address.
        """
        a, b, stranger = world.local(), world.other(), world.other()
        world.allocate(a, b, stranger)
        mine, spare, theirs = a.endpoint(), a.endpoint(), b.endpoint()
        link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: -1})
        wrong = ParticipantLink({stranger.name: stranger.connect(stranger.endpoint(), spare), a.name: -1})
        runs = Runs.of([0], [9], [200_000])
        halves = link.halves(part.way, *part.sides(b, a), runs)
        started = Started([(a, a.submit(batch)) for participant, batch in halves if participant is a])
        source, target = part.sides(b, a)
        expected = overlay(target.content(0), source.content(0), runs)
        before = a.content(0)
        intruding = Started([(stranger, stranger.submit(wrong.half(part, stranger, a, runs)))])
        world.run(0.3)
        assert not started.begun_to_end(), "a batch has ended before its peer was there"
        assert_equal(a.content(0), before, "the memory that nobody may reach yet")
        peer = b.connect(theirs, mine)
        started.halves += [(b, b.submit(replace(batch, peer=peer))) for who, batch in halves if who is b]
        world.succeed(started)
        assert_equal(target.content(0), expected, "the target's memory")
        a.withdraw(spare)
        world.run(0.05)
        for _, number in intruding.halves:
            stranger.abort(number)
        assert all(r.error is not None for r in world.finish(intruding)), "a stranger's batch succeeded"

    def test_connect_does_not_wait_for_the_peer(self, world: World, part: Part) -> None:
        """``connect`` returns at once; batches wait until the peer has connected too, then move."""
        a, b = world.local(), world.other()
        world.allocate(a, b)
        mine, theirs = a.endpoint(), b.endpoint()
        link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: -1})
        before, source = part.sides(a, b)[1].content(0), part.sides(a, b)[0].content(0)
        started = Started([(a, a.submit(link.half(part, a, b, LARGE)))])
        world.run(0.2)
        assert not started.over()
        link = ParticipantLink({a.name: link.peers[a.name], b.name: b.connect(theirs, mine)})
        for participant, batch in link.halves(part.way, *part.sides(a, b), LARGE):
            if participant is b:
                started.halves.append((b, b.submit(batch)))
        world.succeed(started)
        assert_equal(part.sides(a, b)[1].content(0), overlay(before, source, LARGE), "the target's memory")

    def test_two_links_are_independent(self, world: World, way: TransferMode) -> None:
        """Two agents may have several links (one for each direction of dialling); closing one leaves the other."""
        a, b, one = world.pair()
        two = world.link(a, b)
        world.move(one, way, a, b, Runs.of([0], [0], [1000]))
        world.move(two, way, b, a, Runs.of([0], [1], [1000]))
        a.disconnect(one.peers[a.name])
        world.run(0.05)
        world.move(two, way, a, b, Runs.of([0], [7], [2000]))

    def test_a_closed_link_takes_no_batches(self, world: World, part: Part) -> None:
        """``submit`` on a number that never was a link, or no longer is one, raises ``TransportError``."""
        a, b, link = world.pair()
        a.disconnect(link.peers[a.name])
        for peer in (link.peers[a.name], 12_345, -1):
            with pytest.raises(TransportError):
                a.submit(ParticipantLink({a.name: peer, b.name: 0}).half(part, a, b, LARGE))

    @pytest.mark.parametrize("closer", ["near", "far"])
    def test_disconnecting_in_flight(self, world: World, part: Part, closer: str) -> None:
        """Closing a link ends what is in flight on it, on both sides, never silently.

        It ends at once on the side that closes, and on the other as soon as that notices. A one-sided batch may
        have been quicker; then its bytes are right.
        """
        a, b, link = world.pair()
        source, target = part.sides(a, b)
        expected = source.content(0)[:3_000_000]
        started = [Started([(a, a.submit(link.half(part, a, b, LARGE)))]) for _ in range(8)]
        closing = a if closer == "near" else b
        closing.disconnect(link.peers[closing.name])
        world.promptly(lambda: all(s.over() for s in started), "what is in flight on a closed link ends, on both sides")
        results = world.finish(*started)
        errors = [r.error for r in results if r.error is not None]
        assert part.way is not TransferMode.SEND or len(errors) == len(results), "a SEND or RECV alone cannot succeed"
        assert all(b.name in error for error in errors), f"errors must name the peer {b.name!r}: {errors}"
        if len(errors) < len(results):
            assert_equal(target.content(0)[:3_000_000], expected, "what was moved")
