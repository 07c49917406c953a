"""Links between participants, and the batches that move bytes over them in each mode."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from kvxfer.geometry import Runs
from kvxfer.testing.participant import Participant, Result
from kvxfer.transport.contract import Batch, Fence, Verb


class TransferMode(enum.Enum):
    """How bytes get from a source to a target: the target reads, the source writes, or both take part."""

    READ = "read"
    WRITE = "write"
    SEND = "send"


class Part(NamedTuple):
    """What the participant under test does: it submits a transfer, or half of one, as its source or target (``role``)."""

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
    """A link between two participants."""

    peers: dict[str, int]  # by the participant's name, its number for the link
    streams: dict[str, int] = field(default_factory=dict)  # by the source's name, the number of its next SEND

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
        """Submit all halves of a transfer, each with the fence of its participant's name, if there is one."""
        started = Started()
        for participant, batch in self.halves(way, source, target, runs, memory, target_memory):
            started.halves.append((participant, participant.submit(batch, (fences or {}).get(participant.name))))
        return started

    def half(self, part: Part, me: Participant, other: Participant, runs: Runs) -> Batch:
        """Return the batch that the participant under test submits."""
        return next(
            batch for participant, batch in self.halves(part.way, *part.sides(me, other), runs) if participant is me
        )
