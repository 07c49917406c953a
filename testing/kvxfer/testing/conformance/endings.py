"""Ending early: abort, close, and what they guarantee about memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import Part, ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.suite import SIZES, Suite, World
from kvxfer.testing.participant import LocalParticipant
from kvxfer.transport.contract import Batch, Verb

LARGE = Runs.of([0], [0], [3_000_000])


class Endings(Suite):
    """Clauses about batches and transports that end early."""

    def test_aborted_batches_end_and_stay_ended(self, world: World, way: TransferMode) -> None:
        """An aborted batch ends once, soon, with an error (unless it was quicker, and succeeded).

        After it has ended quiet, or after what ``capabilities.quiet`` names has been done, it no longer reads or writes
        memory: bytes that come late must not land. If your library cannot promise that, say so in ``quiet``.
        """
        a, b, link = world.pair()
        source, target = (b, a) if way is TransferMode.READ else (a, b)
        started = [link.start(way, source, target, LARGE) for _ in range(8)]
        for s in started:
            for participant, number in s.halves:
                participant.abort(number)
        world.promptly(lambda: all(s.over() for s in started), "a batch that is aborted ends")
        results = world.finish(*started)
        quiet = [world.make_quiet(participant, link, results) for participant, _ in started[0].halves]
        if all(quiet):
            after = target.content(0)
            source.fill(0, seed=4242)
            world.run(0.3)
            assert_equal(target.content(0), after, "the target's memory after the end")

    def test_what_ends_before_it_is_quiet_gets_quiet(self, world: World, way: TransferMode) -> None:
        """If ``capabilities.quiet`` is ``later``, a ``Quieted`` follows each batch that ended without being quiet.

        Once it has come, and not before, the memory can be deregistered, while the back end and its other links go on.
        """
        if self.capabilities().quiet != "later":
            pytest.skip("capabilities.quiet is not 'later'")
        a, b, link = world.pair()
        c = world.other()
        c.allocate(SIZES, 9)
        other = world.link(a, c)
        for _ in range(5):
            started = [link.start(way, a, b, LARGE) for _ in range(4)]
            for s in started:
                for participant, number in s.halves:
                    participant.abort(number)
            results = world.finish(*started)
            if not all(r.quiet for r in results):
                for participant in (a, b):
                    world.promptly(participant.quiet, "a Quieted follows each batch that ended without being quiet")
            world.move(other, way, a, c, Runs.of([5], [7], [100_000]))
            if self.capabilities().abort == "peer" or a.transport.lost(link.peers[a.name]) is not None:
                for participant in (a, b):
                    participant.disconnect(link.peers[participant.name])
                link = world.link(a, b)
        a.disconnect(other.peers[a.name])
        a.deregister(0)

    def test_an_aborted_write_does_not_land_later(self, world: World) -> None:
        """The target of an aborted write learns of the abort before this side calls the batch quiet.

        Its thread may be busy meanwhile. A target that itself carries out writes must not carry out this one later.
        """
        if TransferMode.WRITE not in self.ways() or not self.in_process:
            pytest.skip("this clause is about a write into memory of this process while its thread is busy")
        for turns in (0, 3):
            a, b, link = world.pair()
            world.move(link, TransferMode.WRITE, a, b, Runs.of([0], [0], [1000]))
            started = [link.start(TransferMode.WRITE, a, b, LARGE) for _ in range(3)]
            for _ in range(turns):
                world.turn(busy=b)
            for s in started:
                a.abort(s.halves[0][1])
            for s in started:
                world.wait_for(s.over, "the end of an aborted write", busy=b)
            if not world.make_quiet(a, link, world.finish(*started)):
                return
            after = b.content(0)
            a.fill(0, seed=4242)
            world.run(0.3)
            assert_equal(b.content(0), after, "the target's memory after the abort")

    def test_a_half_without_its_other_half_can_be_aborted(self, world: World, part: Part) -> None:
        """If the peer never takes part, ``abort`` ends the batch all the same.

        ``capabilities.abort`` says what it ends: one batch, or everything with the peer. Later batches work, on the same link
        (which ``lost`` must then not call lost) or on a new one.
        """
        a, b = world.local(), world.other()
        world.allocate(a, b)
        link = world.link(a, b)
        source, target = part.sides(a, b)
        moved = overlay(target.content(0), source.content(0), LARGE)
        halves = link.halves(part.way, source, target, LARGE)
        for participant, batch in sorted(halves, key=lambda half: half[0] is not a):
            # The second half, if there is one, comes when the first is over. It cannot succeed either, unless it is a RECV whose
            # bytes the library had all carried over before the SEND was aborted, and it has not noticed the link's end.
            started = Started([(participant, participant.submit(batch))])
            world.run(0.05)
            participant.abort(started.halves[0][1])
            world.promptly(started.over, "an abort ends its batch, though the peer takes no part")
            [result] = world.finish(started)
            if result.error is None and participant is b is target and self.capabilities().abort == "peer":
                assert_equal(target.content(0), moved, "the target's memory after a RECV that succeeded")
            elif part.way is TransferMode.SEND:
                other = b if participant is a else a
                assert result.error is not None and other.name in result.error, "the error does not name the peer"
        if self.capabilities().abort == "peer" or not result.quiet:
            a.disconnect(link.peers[a.name])
            b.disconnect(link.peers[b.name])
            link = world.link(a, b)
        assert a.transport.lost(link.peers[a.name]) is None, "a link that works is called lost"
        world.move(link, part.way, source, target, Runs.of([0], [5], [100_000]))

    def test_an_abort_ends_its_batch_and_no_other(self, world: World, part: Part) -> None:
        """An abort ends one batch, and batches before and after it go on and succeed.

        If ``capabilities.abort`` is ``batch``, that includes those of the same link; if it is ``peer``, those of other links.
        Among the SENDs of a direction the aborted one keeps its place: the peer's half of it fails, and the halves around it
        meet as if nothing had happened.
        """
        a, b = world.local(), world.other()
        world.allocate(a, b)
        mine, theirs = a.endpoint(), b.endpoint()
        # b does not connect, so that none ends by itself.
        link = ParticipantLink({a.name: a.connect(mine, theirs), b.name: -1})
        other = world.link(a, b)
        source, target = part.sides(a, b)
        pieces = [Runs.of([i * 50_000], [i * 50_000 + 9], [40_000]) for i in range(5)]
        halves = [link.halves(part.way, source, target, runs) for runs in pieces]
        started = [
            Started([(a, a.submit(batch)) for participant, batch in half if participant is a]) for half in halves
        ]
        world.run(0.05)
        a.abort(started[2].halves[0][1])
        world.promptly(lambda: any(s.over() for s in started), "an abort ends its batch, though the peer takes no part")
        over = [i for i, s in enumerate(started) if s.over()]
        assert 2 in over, f"batch 2 was aborted, and {over} ended"
        [aborted] = world.finish(started[2])
        assert aborted.error is not None, "a batch that could not move succeeded"
        world.run(0.05)  # what is said of it comes to a peer that does not know this link yet
        if self.capabilities().abort == "batch":
            expected, content = target.content(0), source.content(0)
            peer = b.connect(theirs, mine)
            for half, begun in zip(halves, started, strict=True):
                begun.halves += [
                    (b, b.submit(replace(batch, peer=peer))) for participant, batch in half if participant is b
                ]
            ended = world.finish(*started)
            assert len([r for r in ended if r.error is not None]) == len(started[2].halves), [r.error for r in ended]
            for i in (0, 1, 3, 4):
                expected = overlay(expected, content, pieces[i])
            assert_equal(target.content(0), expected, "the target's memory")
        world.move(other, part.way, source, target, Runs.of([0], [600_000], [100_000]))

    def test_each_result_is_of_its_batch(self, world: World, part: Part) -> None:
        """When several batches end in one ``poll``, each gets its own result.

        An aborted one gets its error, one of another link its success. Look at how you match results and batch numbers.
        """
        a, b, link = world.pair()
        c = world.other()
        c.allocate(SIZES, 9)
        other = world.link(a, c)
        source, target = part.sides(a, c)
        for i in range(20):
            # The peer does not take part in the one batch; if it need not, the link is not made yet.
            idle = world.half_link(a, b) if part.way is not TransferMode.SEND else link
            first = Started([(a, a.submit(idle.half(part, a, b, LARGE)))])
            good = other.start(part.way, source, target, Runs.of([i * 1000], [i * 2000], [1000]))
            late = Started([(a, a.submit(idle.half(part, a, b, LARGE)))])
            for begun in (first, late):
                a.abort(begun.halves[0][1])
            failed = world.finish(first, late)
            assert all(r.error is not None for r in failed), "an aborted batch succeeded"
            world.succeed(good)
            if part.way is not TransferMode.SEND or self.capabilities().abort == "peer":
                a.disconnect(idle.peers[a.name])
                if part.way is TransferMode.SEND:
                    b.disconnect(idle.peers[b.name])
                    link = world.link(a, b)

    def test_aborting_what_is_over_does_nothing(self, world: World, way: TransferMode) -> None:
        """Unknown and finished numbers are ignored: an abort often crosses the completion."""
        a, b, link = world.pair()
        started = link.start(way, a, b, Runs.of([0], [0], [1000]))
        world.succeed(started)
        for participant, number in started.halves:
            participant.abort(number)
        a.abort(987_654)
        world.move(link, way, a, b, Runs.of([0], [0], [1000]))

    @pytest.mark.parametrize("closer", ["near", "far"])
    def test_closing_in_flight(self, world: World, part: Part, closer: str) -> None:
        """``close`` ends everything at once, on both sides.

        Afterwards this side's memory is quiet (unless ``quiet`` is ``never``) and may be freed. The peer's batches, and
        those that it submits later, end with an error that names this side.
        """
        a, b, link = world.pair()
        started = [link.start(part.way, *part.sides(a, b), LARGE) for _ in range(8)]
        if part.way is TransferMode.SEND:
            # One that cannot have ended yet, because its other half is missing.
            started.append(Started([(a, a.submit(link.half(part, a, b, LARGE)))]))
        world.turn()
        closing, staying = (a, b) if closer == "near" else (b, a)
        closing.close()
        if self.capabilities().quiet != "never":
            after = closing.content(0)
            staying.fill(0, seed=4242)
            world.run(0.2)
            assert_equal(closing.content(0), after, "the memory of the side that closed")
        left = [Started([(p, n) for p, n in s.halves if p is staying]) for s in started]
        world.promptly(lambda: all(s.over() for s in left), "close ends the batches of the peer, too")
        results = world.finish(*left)
        if staying is a:
            late = world.submit(a, link.half(part, a, b, LARGE))
            last = results[-1:] if part.way is TransferMode.SEND else []
            assert all(r.error is not None for r in [*last, *world.finish(late)]), "nobody was there to take part"
            results += world.finish(late)
        errors = [r.error for r in results if r.error is not None]
        assert all(closing.name in e for e in errors), f"errors must name the peer {closing.name!r}: {errors}"

    def test_after_close_everything_is_refused(self, world: World) -> None:
        """``close`` can be called twice; any other method then raises ``TransportError``.

        ``capabilities`` still answers.
        """
        a, b, link = world.pair()
        mine, t = a.endpoint(), a.transport
        batch = Batch(Verb.SEND, link.peers[a.name], 0, LARGE.length, LARGE.src)
        a.close()
        a.close()
        calls: list[Callable[[], Any]] = [
            lambda: t.submit(batch),
            t.poll,
            t.endpoint,
            lambda: t.connect(mine, mine),
            lambda: t.register([]),
            lambda: t.deregister(0),
        ]
        for call in calls:
            with pytest.raises(TransportError):
                call()

    def test_the_wrong_thread_is_refused_or_safe(self, world: World, way: TransferMode) -> None:
        """Another thread gets ``TransportError`` or is served correctly; either way nothing breaks for the owner."""
        a, b, link = world.pair()
        seen: list[BaseException] = []

        def meddle() -> None:
            calls: list[Callable[[], Any]] = [a.transport.endpoint, lambda: a.transport.abort(1), a.transport.poll]
            for call in calls:
                try:
                    call()
                except BaseException as e:
                    seen.append(e)

        for _ in range(3):
            thread = threading.Thread(target=meddle)
            thread.start()
            thread.join(self.patience_s)
            assert not thread.is_alive(), "a call from another thread hangs"
            world.move(link, way, a, b, Runs.of([0], [0], [100_000]))
        assert all(isinstance(e, TransportError) for e in seen), seen

    def test_close_after_the_owner_thread_ended(self, world: World) -> None:
        """When the thread that made a transport has ended, another one may close it."""
        made: list[LocalParticipant] = []
        thread = threading.Thread(target=lambda: made.append(world.local()))
        thread.start()
        thread.join(self.patience_s)
        [participant] = made
        participant.close()
        assert participant.closed
