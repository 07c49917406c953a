"""What the clauses stand on: participants, links between them, and the one loop that waits."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import pytest

from kvxfer.errors import TransportError
from kvxfer.testing.participant import Bytes, LocalParticipant, Participant, Result, Runs
from kvxfer.testing.ready import ready
from kvxfer.testing.remote_participant import RemoteParticipant
from kvxfer.transport.contract import Batch, Capabilities, Fence, Transport, Verb

__all__ = ["SIZES", "HostFence", "Link", "Part", "Started", "Suite", "Way", "World"]

SIZES = (3 << 20 | 1, 70_003)
"""Regions of a participant's memory unless a clause says otherwise: odd, and more than one."""


class Way(enum.Enum):
    """How bytes get from a source to a target: the target reads, the source writes, or both take part."""

    READ = "read"
    WRITE = "write"
    SEND = "send"


class Part(NamedTuple):
    """What the participant under test does: it submits (one half of) a transfer whose ``role`` it is."""

    way: Way
    role: Literal["source", "target"]

    def sides(self, me: Participant, other: Participant) -> tuple[Participant, Participant]:
        """(source, target)."""
        return (me, other) if self.role == "source" else (other, me)


PARTS = (Part(Way.READ, "target"), Part(Way.WRITE, "source"), Part(Way.SEND, "source"), Part(Way.SEND, "target"))


class HostFence:
    """A fence that a clause opens by hand."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> bool:
        return self.open

    @property
    def event(self) -> None:
        return None


@dataclass
class Started:
    """The submitted batches of one transfer."""

    halves: list[tuple[Participant, int]] = field(default_factory=list)

    def results(self) -> list[Result | None]:
        return [participant.result(batch) for participant, batch in self.halves]

    def over(self) -> bool:
        return all(r is not None for r in self.results())

    def begun_to_end(self) -> bool:
        return any(r is not None for r in self.results())


@dataclass
class Link:
    """A link and each end's number for it. ``peers``: by the participant's name."""

    peers: dict[str, int]
    streams: dict[str, int] = field(default_factory=dict)

    def halves(
        self, way: Way, source: Participant, target: Participant, runs: Runs, memory: int = 0, target_memory: int = 0
    ) -> list[tuple[Participant, Batch]]:
        """The batches that move ``runs`` from source to target, and who submits each."""
        here, there = self.peers[source.name], self.peers[target.name]
        if way is Way.READ:
            batch = Batch(Verb.READ, there, target_memory, runs.lengths, runs.dst, memory, runs.src)
            return [(target, batch)]
        if way is Way.WRITE:
            return [(source, Batch(Verb.WRITE, here, memory, runs.lengths, runs.src, target_memory, runs.dst))]
        stream = self.streams.get(source.name, 0)
        self.streams[source.name] = stream + 1
        return [
            (source, Batch(Verb.SEND, here, memory, runs.lengths, runs.src, stream=stream)),
            (target, Batch(Verb.RECV, there, target_memory, runs.lengths, runs.dst, stream=stream)),
        ]

    def start(
        self,
        way: Way,
        source: Participant,
        target: Participant,
        runs: Runs,
        memory: int = 0,
        target_memory: int = 0,
        fences: Mapping[str, Fence] | None = None,
    ) -> Started:
        """Submit all halves. ``fences``: by the name of the participant whose half waits for it."""
        started = Started()
        for participant, batch in self.halves(way, source, target, runs, memory, target_memory):
            started.halves.append((participant, participant.submit(batch, (fences or {}).get(participant.name))))
        return started

    def half(self, part: Part, me: Participant, other: Participant, runs: Runs) -> Batch:
        """The batch that the participant under test submits."""
        return next(
            batch for participant, batch in self.halves(part.way, *part.sides(me, other), runs) if participant is me
        )


class World:
    """All participants of one test, and the loop that gives them time."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite
        self._local: list[LocalParticipant] = []
        self._remote: list[RemoteParticipant] = []
        self._names = 0

    def local(self) -> LocalParticipant:
        """A participant in this process and thread."""
        participant = LocalParticipant(self._suite.backend, self._suite.options, self._name("local"), self._device())
        self._local.append(participant)
        return participant

    def mortal(self, name: str | None = None) -> Participant:
        """A participant that can be killed, stopped and resumed."""
        return self._suite.make_mortal(self, name or self._name("mortal"))

    def process(self, name: str) -> RemoteParticipant:
        """A participant in a process of its own."""
        participant = RemoteParticipant(self._suite.backend, self._suite.options, name, self._device(), self.turn)
        self._remote.append(participant)
        return participant

    def other(self) -> Participant:
        """A second participant, in this process if the back end can have two there."""
        return self.local() if self._suite.in_process else self.process(self._name("process"))

    def pair(self) -> tuple[LocalParticipant, Participant, Link]:
        """Two connected participants with a memory of ``SIZES`` each."""
        a, b = self.local(), self.other()
        self.allocate(a, b)
        return a, b, self.link(a, b)

    def allocate(self, *participants: Participant) -> None:
        for i, participant in enumerate(participants):
            participant.allocate(SIZES, seed=100 + i)

    def link(self, a: Participant, b: Participant) -> Link:
        mine, theirs = a.endpoint(), b.endpoint()
        return Link({a.name: a.connect(mine, theirs), b.name: b.connect(theirs, mine)})

    def half_link(self, a: Participant, b: Participant) -> Link:
        """A link to which only ``a`` has connected so far."""
        return Link({a.name: a.connect(a.endpoint(), b.endpoint()), b.name: -1})

    def turn(self, wait: float = 0.01) -> None:
        """Wait for something to do, ``wait`` seconds at most, then let each local participant poll if it should."""
        participants = [p for p in self._local if not p.closed]
        waits = [(p, *p.wait()) for p in participants]
        timeout = min([wait, *(t for _, _, t in waits)])
        readable = ready([fd for _, fd, _ in waits if fd is not None], timeout)
        for participant, fd, _ in waits:
            participant.turn(fd in readable)

    def run(self, seconds: float) -> None:
        """Let everything go on for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.turn()

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Let everything go on until the condition holds; fails the test when it takes too long."""
        seconds = self._suite.patience_s if seconds is None else seconds
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{what} took longer than {seconds:g} s"
            self.turn()

    def submit(self, participant: Participant, batch: Batch) -> Started:
        """Submit to a peer that is gone, which may be refused at once: then nothing has started."""
        try:
            return Started([(participant, participant.submit(batch))])
        except TransportError:
            return Started()

    def finish(self, *started: Started, seconds: float | None = None) -> list[Result]:
        """Wait for the end of transfers; returns all results."""
        for s in started:
            self.wait_for(s.over, f"the end of {len(s.halves)} batches", seconds)
        return [r for s in started for r in s.results() if r is not None]

    def succeed(self, *started: Started) -> None:
        """Wait for the end of transfers; none may have failed."""
        errors = [r.error for r in self.finish(*started) if r.error is not None]
        assert not errors, errors

    def move(
        self,
        link: Link,
        way: Way,
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

    def make_quiet(self, participant: Participant, link: Link, results: list[Result]) -> bool:
        """Do what the back end says makes memory quiet after these results; false if nothing does."""
        if all(r.quiet for r in results):
            return True
        scope = self._suite.capabilities().quiet
        assert scope != "batch", "capabilities.quiet is 'batch', so every failed batch must be quiet"
        if scope == "peer_close":
            participant.disconnect(link.peers[participant.name])
            self.run(0.05)
        elif scope == "backend_reset":
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

    ``backend``: the class. ``options``: for every instance. ``memory``: ``cpu`` or ``cuda``.
    ``in_process``: false for a back end that cannot have two instances in one process (or not in one thread).
    ``patience_s``: how long anything may take. ``notice_s``: how long the death of a peer may go unnoticed.
    ``rounds``: of connecting, moving and closing, after which nothing may have leaked. ``closing_s``: how long the library
    goes on closing a link after ``disconnect`` has returned; what is being closed is no leak.
    """

    __test__ = False

    backend: ClassVar[type[Transport]]
    options: ClassVar[Mapping[str, Any]] = {}
    memory: ClassVar[str] = "cpu"
    in_process: ClassVar[bool] = True
    patience_s: ClassVar[float] = 20.0
    notice_s: ClassVar[float] = 15.0
    rounds: ClassVar[int] = 200
    closing_s: ClassVar[float] = 0.0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in vars(cls):
            cls.__test__ = hasattr(cls, "backend")

    @classmethod
    def capabilities(cls) -> Capabilities:
        """Of an instance made for the purpose."""
        transport = cls.backend("capabilities", cls.options)
        try:
            return transport.capabilities
        finally:
            transport.close()

    @classmethod
    def ways(cls) -> list[Way]:
        """The ways of moving that the back end offers."""
        return [way for way in Way if Verb(way.value) in cls.capabilities().verbs]

    def device(self, participant: int) -> str:
        """Where the memory of a test's first, second ... participant lies: one GPU for the first, another (if there is one)
        for all others, so that every transfer crosses."""
        if self.memory != "cuda":
            return self.memory
        import torch

        return "cuda:0" if participant == 0 else f"cuda:{torch.cuda.device_count() - 1}"

    def make_mortal(self, world: World, name: str) -> Participant:
        """A participant that can be killed and stopped. A back end that lives in one process overrides this."""
        return world.process(name)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a clause once for each ``way`` that the back end offers, or that is ``one_sided``, or for each ``part``
        that one participant can have in them, if it takes an argument of that name."""
        choices: dict[str, tuple[Any, ...]] = {"way": tuple(Way), "one_sided": (Way.READ, Way.WRITE), "part": PARTS}
        for name in choices.keys() & metafunc.fixturenames:
            try:
                ways = self.ways()
            except Exception:
                # The library is missing or cannot start. The clauses then fail one by one when they make a
                # transport, unless a mark (such as gpu) keeps them from running here at all.
                ways = list(Way)
            values = [v for v in choices[name] if (v.way if isinstance(v, Part) else v) in ways]
            ids = [f"{v.way.value}-{v.role}" if isinstance(v, Part) else v.value for v in values]
            metafunc.parametrize(name, values, ids=ids)

    @pytest.fixture
    def world(self) -> Iterator[World]:
        world = World(self)
        yield world
        world.close()


def overlay(target: Bytes, source: Bytes, runs: Runs) -> Bytes:
    """What the target holds after the runs have been moved."""
    result = target.copy()
    for src, dst, n in zip(runs.src.tolist(), runs.dst.tolist(), runs.lengths.tolist(), strict=True):
        result[dst : dst + n] = source[src : src + n]
    return result


def assert_equal(found: Bytes, expected: Bytes, what: str) -> None:
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), f"{what}: {len(wrong)} bytes are wrong, the first at flat offset {int(wrong[0])}"
