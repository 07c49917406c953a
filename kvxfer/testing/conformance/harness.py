"""What the clauses are built on: participants, links between them, and the one loop that waits."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.testing.clock import thread_clock
from kvxfer.testing.participant import Bytes, LocalParticipant, Participant, Result, Runs
from kvxfer.testing.ready import ready
from kvxfer.testing.remote_participant import RemoteParticipant
from kvxfer.transport.contract import Batch, Capabilities, Fence, Transport, Verb

__all__ = [
    "SIZES",
    "RuleBroken",
    "OutOfPatience",
    "Part",
    "ParticipantLink",
    "Started",
    "Suite",
    "TransferMode",
    "World",
]

SIZES = (3 << 20 | 1, 70_003)
"""Regions of a participant's memory unless a clause says otherwise: odd, and more than one."""


QUIET_S = 2.0
"""How long a clause waits for memory to get quiet by itself where it does so ``later``, before it closes the back end."""


class RuleBroken(AssertionError):
    """What a rule says has to happen did not."""


class OutOfPatience(AssertionError):
    """Something took too long that is no rule of the clause which waited for it: that says little about where the defect is."""


class TransferMode(enum.Enum):
    """How bytes get from a source to a target: the target reads, the source writes, or both take part."""

    READ = "read"
    WRITE = "write"
    SEND = "send"


class Part(NamedTuple):
    """What the participant under test does: it submits a transfer, or half of one, whose ``role`` it is."""

    way: TransferMode
    role: Literal["source", "target"]

    def sides(self, me: Participant, other: Participant) -> tuple[Participant, Participant]:
        """Return (source, target)."""
        return (me, other) if self.role == "source" else (other, me)


PARTS = (
    Part(TransferMode.READ, "target"),
    Part(TransferMode.WRITE, "source"),
    Part(TransferMode.SEND, "source"),
    Part(TransferMode.SEND, "target"),
)


@dataclass
class Started:
    """The submitted batches of one transfer: the participant that submitted each, and its number there."""

    halves: list[tuple[Participant, int]] = field(default_factory=list)

    def results(self) -> list[Result | None]:
        """Return how each batch ended, ``None`` for those that have not."""
        return [participant.result(batch) for participant, batch in self.halves]

    def over(self) -> bool:
        """Return whether all batches have ended."""
        return all(r is not None for r in self.results())

    def begun_to_end(self) -> bool:
        """Return whether some batch has ended."""
        return any(r is not None for r in self.results())


@dataclass
class ParticipantLink:
    """A link between two participants.

    Attributes:
        peers: By the participant's name, its number for the link.
        streams: By the source's name, the number of its next SEND.
    """

    peers: dict[str, int]
    streams: dict[str, int] = field(default_factory=dict)

    def halves(
        self,
        way: TransferMode,
        source: Participant,
        target: Participant,
        runs: Runs,
        memory: int = 0,
        target_memory: int = 0,
    ) -> list[tuple[Participant, Batch]]:
        """Return the batches that move ``runs`` from source to target, with who submits each."""
        here, there = self.peers[source.name], self.peers[target.name]
        if way is TransferMode.READ:
            batch = Batch(Verb.READ, there, target_memory, runs.length, runs.dst, memory, runs.src)
            return [(target, batch)]
        if way is TransferMode.WRITE:
            return [(source, Batch(Verb.WRITE, here, memory, runs.length, runs.src, target_memory, runs.dst))]
        stream = self.streams.get(source.name, 0)
        self.streams[source.name] = stream + 1
        return [
            (source, Batch(Verb.SEND, here, memory, runs.length, runs.src, stream=stream)),
            (target, Batch(Verb.RECV, there, target_memory, runs.length, runs.dst, stream=stream)),
        ]

    def start(
        self,
        way: TransferMode,
        source: Participant,
        target: Participant,
        runs: Runs,
        memory: int = 0,
        target_memory: int = 0,
        fences: Mapping[str, Fence] | None = None,
    ) -> Started:
        """Submit all halves of a transfer.

        Args:
            way: How to move.
            source: The participant whose memory is read.
            target: The participant whose memory is written.
            runs: What to move.
            memory: Number of the source's memory.
            target_memory: Number of the target's memory.
            fences: By the name of the participant whose half waits for it.
        """
        started = Started()
        for participant, batch in self.halves(way, source, target, runs, memory, target_memory):
            started.halves.append((participant, participant.submit(batch, (fences or {}).get(participant.name))))
        return started

    def half(self, part: Part, me: Participant, other: Participant, runs: Runs) -> Batch:
        """Return the batch that the participant under test submits."""
        return next(
            batch for participant, batch in self.halves(part.way, *part.sides(me, other), runs) if participant is me
        )


class World:
    """All participants of one test, and the loop in which they make progress."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._local: list[LocalParticipant] = []
        self._remote: list[RemoteParticipant] = []
        self._names = 0

    def local(self, device: str | None = None) -> LocalParticipant:
        """Make a participant in this process and thread, with its memory on ``device`` if that is given."""
        name, device = self._name("local"), device or self._device()
        participant = LocalParticipant(self._suite.backend, self._suite.options, name, device)
        self._local.append(participant)
        return participant

    def mortal(self, name: str | None = None) -> Participant:
        """Make a participant that can be killed, stopped and resumed."""
        return self._suite.make_mortal(self, name or self._name("mortal"))

    def process(self, name: str) -> RemoteParticipant:
        """Make a participant in a process of its own."""
        participant = RemoteParticipant(self._suite.backend, self._suite.options, name, self._device(), self.turn)
        self._remote.append(participant)
        return participant

    def other(self) -> Participant:
        """Make a second participant, in this process if the back end can have two there."""
        return self.local() if self._suite.in_process else self.process(self._name("process"))

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
        """Let everything go on for some seconds, but for what the thread of ``busy`` would do."""
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
        if not self._comes(condition, seconds, busy):
            raise OutOfPatience(f"{what} took longer than {self._patience(seconds):g} s")

    def promptly(self, condition: Callable[[], bool], rule: str, seconds: float | None = None) -> None:
        """Let everything go on until the condition holds, which is what the clause is about.

        Raises:
            RuleBroken: It does not come to hold; the message is the rule.
        """
        if not self._comes(condition, seconds, None):
            raise RuleBroken(f"{rule}; it was not so for {self._patience(seconds):g} s")

    def _comes(self, condition: Callable[[], bool], seconds: float | None, busy: Participant | None) -> bool:
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
        """Submit to a peer that is gone. That may be refused at once: then nothing has started."""
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
        """End all participants, whatever became of them."""
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


class Suite:
    """Settings of a suite; a subclass sets them as class attributes.

    Attributes:
        backend: The class under test.
        options: For every instance.
        memory: ``cpu`` or ``cuda``.
        in_process: False for a back end that cannot have two instances in one process (or not in one thread).
        patience_s: Seconds that anything may take, as ``thread_clock`` counts them.
        notice_s: Seconds that the death of a peer may go unnoticed.
        rounds: Rounds of connecting, moving and closing, after which nothing may have leaked.
        revokes: Whether memory that was given back is out of the reach of peers though their links live on. False where a card or
            the kernel moves the bytes and asks nobody: then these links have to be closed first.
        closing_s: Seconds for which the library goes on closing a link after ``disconnect`` has returned. What is being
            closed is no leak.
        gigabytes: Whether batches of gigabytes are tried, which take seconds. Once for a back end is enough.
    """

    __test__ = False

    backend: ClassVar[type[Transport]]
    options: ClassVar[Mapping[str, Any]] = {}
    memory: ClassVar[str] = "cpu"
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
    def capabilities(cls) -> Capabilities:
        """Return what an instance made for the purpose says."""
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
        """Return where the memory of a test's first, second ... participant is.

        In GPU memory it is one GPU for the first, and another (if there is one) for all others, so that every transfer
        goes from GPU to GPU.
        """
        if self.memory != "cuda":
            return self.memory
        import torch

        return "cuda:0" if participant == 0 else f"cuda:{torch.cuda.device_count() - 1}"

    def make_mortal(self, world: World, name: str) -> Participant:
        """Make a participant that can be killed and stopped. A back end that lives in one process overrides this."""
        return world.process(name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a clause once for each choice that the back end offers, by the names of the clause's arguments.

        ``way`` is each way of moving, ``one_sided`` each of those that only one side submits, and ``part`` each part
        that one participant can have in them.
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


def present(kind: str) -> str | None:
    """Return a device of this host that has memory of a kind, ``None`` if there is none that this suite can allocate on."""
    if kind == "cpu":
        return kind
    if kind != "cuda":
        return None
    try:
        import torch
    except ImportError:
        return None
    return "cuda:0" if torch.cuda.is_available() else None


def overlay(target: Bytes, source: Bytes, runs: Runs) -> Bytes:
    """Return what the target holds after the runs have been moved."""
    result = target.copy()
    for src, dst, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True):
        result[dst : dst + n] = source[src : src + n]
    return result


def assert_equal(found: Bytes, expected: Bytes, what: str) -> None:
    """Fail with the number of wrong bytes and the place of the first."""
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{what}: {len(wrong)} bytes are wrong, the first at flat offset {int(wrong[0])}"
