"""Peers that die or stop. The peer is a process of its own, which is really killed."""

from __future__ import annotations

import pytest

from kvxfer.geometry import Runs
from kvxfer.testing.conformance.content import assert_equal
from kvxfer.testing.conformance.participant_link import Part, ParticipantLink, Started
from kvxfer.testing.conformance.suite import SIZES, Suite, World
from kvxfer.testing.participant import Participant

LARGE = Runs.of([0], [0], [3_000_000])


class Deaths(Suite):
    """Clauses about peers that die or stop."""

    @pytest.mark.parametrize("moment", ["before", "during", "after"])
    def test_the_peer_is_killed(self, world: World, part: Part, moment: str) -> None:
        """The death of a peer's process ends every batch of that link.

        They end within ``notice_s`` seconds with an error that names the peer and the cause, whether the peer died
        before it connected, with batches in flight, or between batches. That holds for batches in flight and for those
        submitted later (for these ``submit`` may raise at once). What had completed stays complete. ``lost`` then says why
        the link can no longer be used, unless the back end never calls a link lost.
        """
        a, b, c = world.local(), world.mortal(), world.other()
        world.allocate(a, b)
        other = self._beside(world, a, c)
        in_flight = []
        if moment == "before":
            link = world.half_link(a, b)
        else:
            link = world.link(a, b)
            world.move(link, part.way, *part.sides(a, b), Runs.of([0], [3], [1000]))
            if moment == "during":
                in_flight = [link.start(part.way, *part.sides(a, b), LARGE) for _ in range(6)]
        b.kill()
        late = world.submit(a, link.half(part, a, b, LARGE))
        world.promptly(late.over, "a batch with a dead peer ends", self.notice_s)
        ended = world.finish(late)
        assert all(r.error is not None for r in ended), "a batch with a dead peer succeeded"
        mine = [Started([h for h in s.halves if h[0] is a]) for s in in_flight]
        world.promptly(lambda: all(s.over() for s in mine), "what was in flight with a dead peer ends", self.notice_s)
        ended += world.finish(*mine)
        lost = a.transport.lost(link.peers[a.name])
        assert lost is None or lost.detail.strip(), "a link is lost for no reason"
        for error in [r.error for r in ended if r.error is not None]:
            cause = error.replace(b.name, "")
            assert b.name in error and len(cause.split()) > 3, f"the peer is {b.name!r}; the error: {error}"
        world.move(other, part.way, *part.sides(a, c), Runs.of([5], [0], [1_000_000]), 1, 1)

    def test_a_restarted_peer_is_a_new_one(self, world: World, part: Part) -> None:
        """A process that died and was restarted under the same name is reached with a new endpoint.

        The old process's link does not get in the way, nor do batches that were in flight on it.
        """
        a, b = world.local(), world.mortal()
        world.allocate(a, b)
        link = world.link(a, b)
        world.move(link, part.way, *part.sides(a, b), Runs.of([0], [0], [1000]))
        started = [link.start(part.way, *part.sides(a, b), LARGE) for _ in range(3)]
        b.kill()
        again = world.mortal(b.name)
        again.allocate([1 << 20], 7)
        mine = [Started([h for h in s.halves if h[0] is a]) for s in started]
        world.promptly(lambda: all(s.over() for s in mine), "what was in flight with a dead peer ends", self.notice_s)
        if not world.make_quiet(a, link, world.finish(*mine)) or a.closed:
            return
        a.fill(0, seed=77)
        link = world.link(a, again)
        for i in range(3):
            world.move(link, part.way, *part.sides(a, again), Runs.of([i], [2 * i], [1000]))

    def test_the_peer_is_stopped(self, world: World, part: Part) -> None:
        """A stopped peer (SIGSTOP, or a hung host) blocks nobody, although most libraries never notice it.

        Other peers are served, and ``abort`` ends the batch. When the peer goes on, what it still does for that
        batch does not touch memory that was quiet, and a new link works.
        """
        a, b, c = world.local(), world.mortal(), world.other()
        world.allocate(a, b)
        other_link = self._beside(world, a, c)
        link = world.link(a, b)
        world.move(link, part.way, *part.sides(a, b), Runs.of([0], [0], [10]))
        batches = link.halves(part.way, *part.sides(a, b), LARGE)
        for batch in [batch for participant, batch in batches if participant is b]:
            b.submit(batch)
        b.stop()
        started = Started([(a, a.submit(batch)) for participant, batch in batches if participant is a])
        for size in (10, 100_000, 1_000_000):
            world.move(other_link, part.way, a, c, Runs.of([0], [0], [size]), 1, 1)
        for _, number in started.halves:
            a.abort(number)
        quiet = world.make_quiet(a, link, world.finish(started))
        after = a.content(0)
        b.resume()
        world.run(0.3)
        if quiet:
            assert_equal(a.content(0), after, "memory that was quiet")
        if not a.closed:
            world.move(world.link(a, b), part.way, *part.sides(a, b), Runs.of([0], [0], [1000]))

    def _beside(self, world: World, a: Participant, c: Participant) -> ParticipantLink:
        """Link ``a`` with one more peer, by memories 1: what is in flight with another one may still change the first memory."""
        c.allocate([1000], 1)
        for participant in (a, c):
            participant.allocate(SIZES, 7)
        return world.link(a, c)
