"""The settings of a suite, how a clause is run once for each mode that its back end offers, and the participants of one test.

A suite and a ``World`` need each other: a world's participants are of the suite's back end, and a suite may make some of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, cast

import pytest

from kvxfer.errors import TransportError
from kvxfer.geometry import HOST, Runs
from kvxfer.memory import devices_of
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.conformance.content import assert_equal, overlay
from kvxfer.testing.conformance.participant_link import PARTS, Part, ParticipantLink, Started, TransferMode
from kvxfer.testing.participant import LocalParticipant, Participant, Result
from kvxfer.testing.ready import ready
from kvxfer.testing.remote_participant import RemoteParticipant
from kvxfer.transport.contract import Batch, Capabilities, Transport, Verb

SIZES = (3 << 20 | 1, 70_003)
"""Regions of a participant's memory unless a clause says otherwise: odd, and more than one."""

QUIET_S = 2.0
"""How long a clause waits for memory to get quiet ``later`` by itself, before it closes the back end."""


class RuleBroken(AssertionError):
    """Something that a rule demands did not happen."""


class OutOfPatience(AssertionError):
    """Something took too long that the clause only waited for: its failure says little about where the defect is."""


class Suite:
    """Settings of a suite; a subclass sets them as class attributes.

    Attributes:
        backend: The class under test.
        options: The options of every instance.
        memory: The kind of memory to test with: ``cpu``, or a kind of device such as ``cuda``.
        in_process: False for a back end that cannot have two instances in one process (or not in one thread).
        patience_s: Seconds that anything may take, as ``thread_clock`` counts them.
        notice_s: Seconds for which the death of a peer may go unnoticed.
        rounds: Rounds of connecting, moving and closing, after which nothing may have leaked.
        revokes: Whether deregistered memory is out of the reach of peers although their links live on. False if a network card or
            the kernel moves the bytes without asking anybody: then these links have to be closed first.
        closing_s: Seconds for which the library may go on closing a link after ``disconnect`` has returned. Until then,
            what it holds is not counted as a leak.
        gigabytes: Whether batches of gigabytes are tried, which take seconds. Once for each back end is enough.
    """

    __test__ = False

    backend: ClassVar[type[Transport]]
    options: ClassVar[Mapping[str, Any]] = {}
    memory: ClassVar[str] = HOST
    in_process: ClassVar[bool] = True
    patience_s: ClassVar[float] = 20.0
    notice_s: ClassVar[float] = 15.0
    rounds: ClassVar[int] = 200
    revokes: ClassVar[bool] = True
    closing_s: ClassVar[float] = 0.0
    gigabytes: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = hasattr(cls, "backend")

    @classmethod
    @functools.cache  # each clause asks, three times as it is collected
    def capabilities(cls) -> Capabilities:
        """Return the capabilities of an instance made for this purpose, once for a suite."""
        transport = cls.backend("capabilities", cls.options)
        try:
            return transport.capabilities
        finally:
            transport.close()

    @classmethod
    def ways(cls) -> list[TransferMode]:
        """Return the ways of moving that the back end offers."""
        return [way for way in TransferMode if Verb(way.value) in cls.capabilities().verbs]

    def device(self, participant: int) -> str:
        """Return the device of the memory of a test's first, second ... participant.

        The first participant has one device and all others another (if there is one), so that every transfer goes from
        device to device.
        """
        found = devices_of(self.memory)
        return found[0 if participant == 0 else -1]

    def make_mortal(self, world: World, name: str) -> Participant:
        """Make a participant that can be killed and stopped. A back end that lives in one process overrides this."""
        return world.process(name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a clause once for each value of those of its arguments that stand for modes of the back end.

        ``way`` is each way of moving bytes, ``one_sided`` each of those that only one side submits, and ``part`` each part
        that a participant can have in them.
        """
        choices: dict[str, tuple[Any, ...]] = {
            "way": tuple(TransferMode),
            "one_sided": (TransferMode.READ, TransferMode.WRITE),
            "part": PARTS,
        }
        for name in choices.keys() & metafunc.fixturenames:
            try:
                ways = self.ways()
            except Exception:
                # The library is missing or cannot start. The clauses then fail one by one when they make a
                # transport, unless a mark (such as gpu) keeps them from running here at all.
                ways = list(TransferMode)
            values = [v for v in choices[name] if (v.way if isinstance(v, Part) else v) in ways]
            ids = [f"{v.way.value}-{v.role}" if isinstance(v, Part) else v.value for v in values]
            metafunc.parametrize(name, values, ids=ids)

    @pytest.fixture
    def world(self) -> Iterator[World]:
        """Give a test its participants, and end them afterwards."""
        world = World(self)
        yield world
        world.close()


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
        """Let everything go on for some seconds, except what the thread of ``busy`` would do.

        It has a turn for each 5 ms, however long this process stands still meanwhile.
        """
        until, turns = time.monotonic() + seconds, seconds / 0.005
        while turns > 0 or time.monotonic() < until:
            self.turn(0.005, busy)
            turns -= 1

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
        """Let everything go on until the condition holds; return false if that takes too long.

        It has a turn for each 20 ms, however long this process stands still meanwhile.
        """
        patience = self._patience(seconds)
        until, turns = thread_clock() + patience, patience / 0.02
        while not condition():
            if turns <= 0 and thread_clock() > until:
                return False
            self.turn(busy=busy)
            turns -= 1
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
