"""Random histories of agents, after each step of which every byte of all their memory is compared."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.geometry.region import GAP
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.fences import HostFence
from kvxfer.testing.conformance.participant_link import ParticipantLink, Started, TransferMode
from kvxfer.testing.conformance.patterns import drawn
from kvxfer.testing.conformance.suite import Suite, World
from kvxfer.testing.participant import Bytes, LocalParticipant, Participant, Result
from kvxfer.transport.contract import Batch

SIZES = (4 << 20 | 1, 70_003)
STARTS = (0, -(-SIZES[0] // GAP) * GAP + GAP)
"""The regions of each memory, and where they begin: large enough for an abort to come during a batch."""

HISTORIES, STEPS = 3, 30
"""How many histories there are, and how many steps each has, however long they take: the same history on every host."""
MAX_LINKS, MAX_BATCHES = 5, 6
PAUSES = (0.0, 0.0, 0.005)
"""Seconds between one end of a link and the other, say."""
UNKNOWN = 77
"""The number of a memory that nobody has."""


@dataclass(eq=False)
class HistorySide:
    """An agent, and what each of its memories must hold."""

    participant: Participant
    memories: dict[int, Bytes] = field(default_factory=dict)


@dataclass(eq=False)
class Line:
    """A link of the hub with one of its peers, and the memories that each had when it was made."""

    link: ParticipantLink
    sides: tuple[HistorySide, HistorySide]
    known: tuple[Collection[int], Collection[int]]

    def memories(self, side: HistorySide) -> list[int]:
        """Return the memories of a side that it reaches and that are still there."""
        return [m for m in self.known[self.sides.index(side)] if m in side.memories]


@dataclass(eq=False)
class Transfer:
    """A transfer that a step has started: the line, the (side, memory) that it takes from and fills, and its runs."""

    line: Line
    source: tuple[HistorySide, int]
    target: tuple[HistorySide, int]
    runs: Runs
    started: Started


class History:
    """What happens to a hub and to two peers that have the same name, drawn from a seed."""

    def __init__(self, suite: Suite, world: World, way: TransferMode, seed: int) -> None:
        self._suite, self._world, self._way = suite, world, way
        self._dice = np.random.default_rng(seed)
        self._fills = 0
        self._fences: list[HostFence] = []
        hub, peer = world.local(), world.other()  # the first is on a device of its own
        self._hub, *self._peers = self._sides = [HistorySide(p) for p in (hub, peer, world.other(peer.name))]
        for side in self._sides:
            for _ in range(2 if side is self._hub else 1):
                self._fill(side, side.participant.allocate_untouched(SIZES))
        self._lines = [self._line() for _ in range(3)]
        self._over = False

    def run(self) -> None:
        """Let it all happen."""
        refusals = 0 if self._way is TransferMode.SEND else 3
        steps = [self._move] * 8 + [self._abort] * 6 + [self._cut] * 3 + [self._reconnect] * 3
        steps += [self._restart, self._give_up, self._give_up] + [self._register_again] * 3 + [self._refuse] * refusals
        done: list[str] = []
        while len(done) < STEPS and not self._over:
            step = steps[int(self._dice.integers(len(steps)))]
            done.append(step.__name__.strip("_"))
            try:
                step()
                while len(self._lines) < 2:
                    self._lines.append(self._line())
            except AssertionError as e:
                e.add_note(f"the steps of this history: {', '.join(done)}")
                raise

    # The steps

    def _move(self) -> None:
        """Move batches over several links at once."""
        self._end(self._start(MAX_BATCHES), [])

    def _abort(self) -> None:
        """Abort batches in flight, from one side or both. Those that have nothing to do with them succeed."""
        transfers = self._start(MAX_BATCHES // 2)
        self._begin(transfers[0])
        aborted = [t for t in transfers if t is transfers[0] or self._dice.random() < 0.3]
        for t in aborted:
            sides = self._dice.permutation(len(t.started.halves))
            for i in sides[: int(self._dice.integers(1, 3))].tolist():
                participant, number = t.started.halves[i]
                participant.abort(number)
        if self._suite.capabilities().abort == "peer":
            aborted = [t for t in transfers if any(t.line is x.line for x in aborted)]
        self._end(transfers, aborted)

    def _cut(self) -> None:
        """Close a link while batches are in flight on it and on others."""
        transfers = self._start(MAX_BATCHES // 2)
        self._begin(transfers[0])
        self._close(transfers[0].line)
        self._end(transfers, [t for t in transfers if t.line is transfers[0].line])

    def _reconnect(self) -> None:
        """Close a link while nothing is in flight on it, and make others."""
        self._close(self._lines[int(self._dice.integers(len(self._lines)))])
        while len(self._lines) < self._dice.integers(2, MAX_LINKS + 1):
            self._lines.append(self._line())
        self._check()

    def _restart(self) -> None:
        """Close a peer while batches are in flight with it and with others, and have another one in its place."""
        i = int(self._dice.integers(2))
        old = self._peers[i].participant
        transfers = self._start(MAX_BATCHES // 2)
        self._begin(transfers[0])
        old.close()
        cut = [t for t in transfers if self._peers[i] in t.line.sides]
        for t in cut:
            t.started.halves = [half for half in t.started.halves if half[0] is not old]
        for line in [x for x in self._lines if self._peers[i] in x.sides]:
            self._lines.remove(line)
            self._world.run(float(self._dice.choice(PAUSES)))
            self._hub.participant.disconnect(line.link.peers[self._hub.participant.name])
        new = self._peers[i] = self._sides[1 + i] = HistorySide(self._world.other(old.name))
        self._fill(new, new.participant.allocate_untouched(SIZES))
        self._end(transfers, cut)

    def _give_up(self) -> None:
        """Connect to nonsense, and make one side of a link only, with a batch that waits for the other side, and give it up."""
        here, peer = self._hub, self._peers[int(self._dice.integers(2))]
        with pytest.raises(TransportError):
            here.participant.connect(here.participant.endpoint(), b"not an endpoint")
        mine, theirs = here.participant.endpoint(), peer.participant.endpoint()
        line = Line(
            ParticipantLink({here.participant.name: here.participant.connect(mine, theirs), peer.participant.name: -1}),
            (here, peer),
            (list(here.memories), list(peer.memories)),
        )
        source, target = self._ends(line, hub_is_target=self._way is TransferMode.READ)
        halves = self._halves(line, source, target, Runs.of([0], [9], [1 << 20]))
        started = Started([(p, p.submit(batch)) for p, batch in halves if p is here.participant])
        self._world.run(PAUSES[-1])
        assert not started.over(), "a batch has ended before its peer was there"
        if self._dice.random() < 0.5:
            here.participant.abort(started.halves[0][1])
        peer.participant.withdraw(theirs)
        here.participant.disconnect(line.link.peers[here.participant.name])
        self._failed(line, [(peer, result) for result in self._world.finish(started)])
        self._check()

    def _register_again(self) -> None:
        """Give back a memory, and register the same bytes under another number, by which links that are made later reach them."""
        side = self._sides[int(self._dice.integers(len(self._sides)))]
        old = int(self._dice.choice(list(side.memories)))
        if not self._suite.revokes:
            for line in [x for x in self._lines if side in x.sides]:
                self._close(line)
        lines = [x for x in self._lines if side in x.sides and old in x.memories(side)]
        side.memories[side.participant.register_again(old)] = side.memories.pop(old)
        for line in lines:
            self._refused(line, (side, old), Runs.of([1], [7], [5000]))
            [other] = (s for s in line.sides if s is not side)
            if self._way is TransferMode.READ:  # which may have been found out as late as when it was over
                memory = line.memories(other)[0]
                other.memories[memory][7:5007] = other.participant.read(memory, 7, 5000)
        for line in [x for x in self._lines if not all(x.memories(s) for s in x.sides)]:
            self._close(line)
        self._check()

    def _refuse(self) -> None:
        """Name memory or bytes that the peer has not: such a batch fails, and not even its good run moves."""
        line = self._lines[int(self._dice.integers(len(self._lines)))]
        source, target = self._ends(line, hub_is_target=self._dice.random() < 0.5)
        owner, memory = source if self._way is TransferMode.READ else target
        if self._dice.random() < 0.5:
            self._refused(line, (owner, UNKNOWN), Runs.of([3], [1], [5000]))
        else:
            good = self._dice.integers(0, SIZES[0] - 5000, 2)
            bad = [int(self._dice.choice([SIZES[0] - 1, STARTS[1] - 9, -1, 1 << 40])), STARTS[1]]
            src, dst = bad if self._way is TransferMode.READ else bad[::-1]
            self._refused(line, (owner, memory), Runs.of([good[0], src], [good[1], dst], [5000, 2]))
        self._check()

    def _refused(self, line: Line, remote: tuple[HistorySide, int], runs: Runs) -> None:
        """Have a peer submit a batch on memory of this side that fails; with SEND or RECV, this side itself."""
        owner, _ = remote
        [other] = (s for s in line.sides if s is not owner)
        own = other, line.memories(other)[0]
        if self._way is TransferMode.SEND:
            [(_, batch), _] = self._halves(line, remote, own, runs)
            with pytest.raises(TransportError):
                owner.participant.submit(batch)
            return
        [(asker, batch)] = self._halves(
            line, *((remote, own) if self._way is TransferMode.READ else (own, remote)), runs
        )
        ended = self._world.finish(self._world.submit(asker, batch))
        assert all(r.error is not None for r in ended), "a batch that the owner of the memory has to refuse succeeded"
        self._failed(line, [(owner, r) for r in ended])

    # What they are made of

    def _fill(self, side: HistorySide, memory: int) -> None:
        self._fills += 1
        side.participant.fill(memory, self._fills)
        side.memories[memory] = side.participant.content(memory)

    def _line(self) -> Line:
        sides = self._hub, self._peers[int(self._dice.integers(2))]
        link = self._world.link(*(s.participant for s in sides))
        return Line(link, sides, (list(sides[0].memories), list(sides[1].memories)))

    def _close(self, line: Line) -> None:
        """Close a link from one side, and from the other at once or a little later."""
        if line in self._lines:
            self._lines.remove(line)
            for i in self._dice.permutation(2).tolist():
                participant = line.sides[i].participant
                participant.disconnect(line.link.peers[participant.name])
                self._world.run(float(self._dice.choice(PAUSES)))

    def _ends(self, line: Line, hub_is_target: bool) -> tuple[tuple[HistorySide, int], tuple[HistorySide, int]]:
        """Return a source and a target on a line, each a side with a memory."""
        here, there = ((s, int(self._dice.choice(line.memories(s)))) for s in line.sides)
        return (there, here) if hub_is_target else (here, there)

    def _halves(
        self, line: Line, source: tuple[HistorySide, int], target: tuple[HistorySide, int], runs: Runs
    ) -> list[tuple[Participant, Batch]]:
        return line.link.halves(self._way, source[0].participant, target[0].participant, runs, source[1], target[1])

    def _start(self, most: int) -> list[Transfer]:
        """Start transfers. Of each memory one half is read from and the other filled, each part by one of them."""
        count = int(self._dice.integers(1, most + 1))
        fills_upper: dict[tuple[HistorySide, int], bool] = {}
        transfers: list[Transfer] = []
        for i in range(count):
            line = self._lines[int(self._dice.integers(len(self._lines)))]
            source, target = self._ends(line, hub_is_target=self._dice.random() < 0.5)
            stretches = []
            for end in (source, target):
                region = int(self._dice.random() < 0.2)
                upper = fills_upper.setdefault(end, bool(self._dice.random() < 0.5)) is (end is target)
                low = SIZES[region] // 2
                stretches.append((STARTS[region] + low, SIZES[region] - low) if upper else (STARTS[region], low))
            (begin, room), part = stretches[1], stretches[1][1] // count
            runs = drawn(self._dice, stretches[0], (begin + i * part, room - i * part if i == count - 1 else part))
            started = Started()
            for participant, batch in self._halves(line, source, target, runs):
                fence = None
                if participant is self._hub.participant and self._dice.random() < 0.3:
                    self._fences.append(fence := HostFence())
                started.halves.append((participant, participant.submit(batch, fence)))
            transfers.append(Transfer(line, source, target, runs, started))
        return transfers

    def _begin(self, transfer: Transfer) -> None:
        """Let a transfer begin: not at all, for some turns, or until its first bytes have arrived. Fences pass by then, or at its end."""
        for _ in range(int(self._dice.choice([0, 1, 3, 10]))):
            self._world.turn(0)
        if transfer.runs.length.sum() and self._dice.random() < 0.6:
            self._open_fences()
            run = int(transfer.runs.length.argmax())
            at, nbytes = int(transfer.runs.dst[run]), min(64, int(transfer.runs.length[run]))
            side, memory = transfer.target
            before = side.memories[memory][at : at + nbytes]
            self._world.wait_for(
                lambda: (
                    transfer.started.begun_to_end()
                    or not np.array_equal(side.participant.read(memory, at, nbytes), before)
                ),
                "the beginning of a transfer",
            )

    def _open_fences(self) -> None:
        while self._fences:
            self._fences.pop().open = True

    def _end(self, transfers: list[Transfer], may_fail: list[Transfer]) -> None:
        """Wait for the end of transfers, make memory quiet, and check that only what may have changed has."""
        if may_fail and self._dice.random() < 0.5:  # those that wait may end before their fence has passed
            self._world.run(PAUSES[-1])
        self._open_fences()
        self._world.promptly(lambda: all(t.started.over() for t in transfers), "what is aborted or cut off ends")
        self._world.succeed(*(t.started for t in transfers if t not in may_fail))
        for t in may_fail:
            here, there = t.line.sides
            halves = zip(t.started.halves, self._world.finish(t.started), strict=True)
            ended = [(there if p is here.participant else here, r) for (p, _), r in halves]
            self._failed(t.line, [(peer, result) for peer, result in ended if result.error is not None])
        if not self._over:
            self._check(transfers)
            for side, memory in {end for t in may_fail for end in (t.source, t.target) if end[0] in self._sides}:
                self._fill(side, memory)

    def _failed(self, line: Line, ended: list[tuple[HistorySide, Result]]) -> None:
        """Check that failed batches name the peer, which each result comes with, and do what makes memory quiet."""
        can = self._suite.capabilities()
        for peer, result in ended:
            name, error = peer.participant.name, result.error or ""
            assert name in error, f"the peer is {name!r}; the error: {error}"
            assert result.quiet or can.quiet != "batch", "a failed batch is not quiet"
        lost = line in self._lines and any(
            isinstance(p, LocalParticipant) and p.transport.lost(line.link.peers[p.name]) is not None
            for p in (side.participant for side in line.sides)
        )
        if ended and (lost or can.abort == "peer" or can.quiet == "peer_close"):
            self._close(line)
        if can.quiet != "peer_close" and not all(result.quiet for _, result in ended):
            quiet = can.quiet == "later" and self._world.comes(lambda: all(s.participant.quiet() for s in self._sides))
            self._over = self._over or not quiet

    def _check(self, transfers: Collection[Transfer] = ()) -> None:
        """Compare all memory: what has succeeded has arrived, what failed batches were to fill is undefined, and nothing else has changed.

        Bytes of a failed batch need not be the old or the new ones: NCCL, once aborted, copies what its buffers happen to hold.
        """
        self._world.run(float(self._dice.choice(PAUSES)))
        undefined: dict[tuple[HistorySide, int], Bytes] = {}
        for t in transfers:
            (source, memory), (target, filled) = t.source, t.target
            if any(r and r.error is None for r in t.started.results()):
                target.memories[filled] = overlay(target.memories[filled], source.memories[memory], t.runs)
            else:
                nowhere = undefined.get(t.target, np.zeros_like(target.memories[filled]))
                undefined[t.target] = overlay(nowhere, np.ones_like(source.memories[memory]), t.runs)
        for side in self._sides:
            for memory, expected in side.memories.items():
                found = side.participant.content(memory)
                if (side, memory) in undefined:
                    expected = np.where(undefined[side, memory], found, expected)
                assert_equal(found, expected, f"memory {memory} of {side.participant.name!r}")
                side.memories[memory] = found


class Histories(Suite):
    """The clause about histories."""

    @pytest.mark.parametrize("seed", range(HISTORIES))
    def test_any_history(self, world: World, way: TransferMode, seed: int) -> None:
        """Whatever has happened before, a batch that succeeds has moved its bytes, and no other byte has changed.

        What happens is drawn at random: batches over several links at once, fences, aborts during them, links that are cut, closed, made
        again or given up, peers that restart, memory that is registered again under another number, and batches that are refused.
        The report has the steps. Look at what your back end keeps of a batch, a link or a memory that has ended.
        """
        History(self, world, way, seed).run()
