"""The participants of one test, and the one loop in which they make progress and clauses wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from kvxfer.errors import TransportError
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import ParticipantLink, Started, TransferMode
from kvxfer.testing.participant import LocalParticipant, Participant, Result, Runs
from kvxfer.testing.ready import ready
from kvxfer.testing.remote_participant import RemoteParticipant
from kvxfer.transport.contract import Batch

if TYPE_CHECKING:
    from kvxfer.testing.conformance.suite import Suite

__all__ = ["SIZES", "OutOfPatience", "RuleBroken", "World"]

SIZES = (3 << 20 | 1, 70_003)
"""Regions of a participant's memory unless a clause says otherwise: odd, and more than one."""

QUIET_S = 2.0
"""How long a clause waits for memory to get quiet ``later`` by itself, before it closes the back end."""


class RuleBroken(AssertionError):
    """Something that a rule demands did not happen."""


class OutOfPatience(AssertionError):
    """Something took too long that the clause only waited for: its failure says little about where the defect is."""


class World:
    """All participants of one test, and the loop in which they make progress."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._local: list[LocalParticipant] = []
        self._remote: list[RemoteParticipant] = []
        self._names = 0

    def local(self, device: str | None = None, name: str | None = None) -> LocalParticipant:
        """Make a participant in this process and thread, with its memory on ``device`` if that is given."""
        name, device = name or self._name("local"), device or self._device()
        participant = LocalParticipant(self._suite.backend, self._suite.options, name, device)
        self._local.append(participant)
        return participant

    def mortal(self, name: str | None = None) -> Participant:
        """Make a participant that can be killed, stopped and resumed."""
        return self._suite.make_mortal(self, name or self._name("mortal"))

    def process(self, name: str) -> Participant:
        """Make a participant in a process of its own."""
        participant = RemoteParticipant(self._suite.backend, self._suite.options, name, self._device(), self.turn)
        self._remote.append(participant)
        return cast(Participant, participant)

    def other(self, name: str | None = None) -> Participant:
        """Make a second participant, in this process if the back end can have two there."""
        return self.local(name=name) if self._suite.in_process else self.process(name or self._name("process"))

    def pair(self) -> tuple[LocalParticipant, Participant, ParticipantLink]:
        """Make two connected participants with a memory of ``SIZES`` each."""
        a, b = self.local(), self.other()
        self.allocate(a, b)
        return a, b, self.link(a, b)

    def allocate(self, *participants: Participant) -> None:
        """Give each participant a memory of ``SIZES``, with content of its own."""
        for i, participant in enumerate(participants):
            participant.allocate(SIZES, seed=100 + i)

    def link(self, a: Participant, b: Participant) -> ParticipantLink:
        """Connect both participants."""
        mine, theirs = a.endpoint(), b.endpoint()
        return ParticipantLink({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})

    def half_link(self, a: Participant, b: Participant) -> ParticipantLink:
        """Connect ``a`` to ``b``, but not ``b`` to ``a``."""
        return ParticipantLink({a.name: a.connect(a.endpoint(), b.endpoint()), b.name: -1})

    def turn(self, wait: float = 0.01, busy: Participant | None = None) -> None:
        """Wait for something to do, ``wait`` seconds at most, then let each local participant poll if it should.

        The thread of ``busy`` does something else meanwhile.
        """
        participants = [p for p in self._local if not (p.closed or p is busy)]
        waits = [(p, *p.wait()) for p in participants]
        timeout = min([wait, *(t for _, _, t in waits)])
        readable = ready([fd for _, fd, _ in waits if fd is not None], timeout)
        for participant, fd, _ in waits:
            participant.turn(fd in readable)

    def run(self, seconds: float, busy: Participant | None = None) -> None:
        """Let everything go on for some seconds, except what the thread of ``busy`` would do."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn(busy=busy)

    def wait_for(
        self, condition: Callable[[], bool], what: str, seconds: float | None = None, busy: Participant | None = None
    ) -> None:
        """Let everything go on until the condition holds.

        Raises:
            OutOfPatience: It takes too long.
        """
        if not self.comes(condition, seconds, busy):
            raise OutOfPatience(f"{what} took longer than {self._patience(seconds):g} s")

    def promptly(self, condition: Callable[[], bool], rule: str, seconds: float | None = None) -> None:
        """Let everything go on until the condition holds, as the rule under test demands.

        Raises:
            RuleBroken: It does not come true in time; the message is the rule.
        """
        if not self.comes(condition, seconds):
            raise RuleBroken(f"{rule}; that did not happen within {self._patience(seconds):g} s")

    def comes(
        self, condition: Callable[[], bool], seconds: float | None = None, busy: Participant | None = None
    ) -> bool:
        """Let everything go on until the condition holds; return false if that takes too long."""
        until = thread_clock() + self._patience(seconds)
        while not condition():
            if thread_clock() > until:
                return False
            self.turn(busy=busy)
        return True

    def _patience(self, seconds: float | None) -> float:
        return self._suite.patience_s if seconds is None else seconds

    def submit(self, participant: Participant, batch: Batch) -> Started:
        """Submit a batch to a peer that is gone. It may be refused at once, and then nothing has started."""
        try:
            return Started([(participant, participant.submit(batch))])
        except TransportError:
            return Started()

    def finish(self, *started: Started, seconds: float | None = None) -> list[Result]:
        """Wait for the end of transfers, and return all results."""
        for s in started:
            self.wait_for(s.over, f"the end of {len(s.halves)} batches", seconds)
        return [r for s in started for r in s.results() if r is not None]

    def succeed(self, *started: Started) -> None:
        """Wait for the end of transfers, none of which may fail."""
        errors = [r.error for r in self.finish(*started) if r.error is not None]
        assert not errors, errors

    def move(
        self,
        link: ParticipantLink,
        way: TransferMode,
        source: Participant,
        target: Participant,
        runs: Runs,
        memory: int = 0,
        target_memory: int = 0,
    ) -> None:
        """Move runs and check that exactly those bytes have changed."""
        before, wanted = target.content(target_memory), source.content(memory)
        self.succeed(link.start(way, source, target, runs, memory, target_memory))
        assert_equal(target.content(target_memory), overlay(before, wanted, runs), "the target's memory")
        assert_equal(source.content(memory), wanted, "the source's memory")

    def make_quiet(self, participant: Participant, link: ParticipantLink, results: list[Result]) -> bool:
        """Do what the back end says makes memory quiet after these results; return false if nothing does."""
        if all(r.quiet for r in results):
            return True
        scope = self._suite.capabilities().quiet
        assert scope != "batch", "capabilities.quiet is 'batch', so every failed batch must be quiet"
        if scope == "peer_close":
            participant.disconnect(link.peers[participant.name])
            self.run(0.05)
        elif scope in ("later", "backend_reset"):
            until = time.monotonic() + (QUIET_S if scope == "later" else 0)
            while not participant.quiet() and time.monotonic() < until:
                self.turn()
            if not participant.quiet():
                participant.close()
        return scope != "never"

    def close(self) -> None:
        """End all participants, in whatever state they are."""
        for participant in self._remote:
            participant.end()
        for local in self._local:
            local.close()
            local.free()

    def adopt(self, participant: LocalParticipant) -> None:
        """Take over a participant that a suite has made itself."""
        self._local.append(participant)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"

    def _device(self) -> str:
        return self._suite.device(len(self._local) + len(self._remote))
