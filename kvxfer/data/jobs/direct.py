"""A part whose runs go as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxfer.data.jobs.job import CACHE, PIECES, Job, Wire
from kvxfer.geometry import CopyPlan, Region
from kvxfer.protocol.parts import most_bytes
from kvxfer.protocol.values import Move
from kvxfer.transport import Batch, PlanBatch, Verb

__all__ = ["Direct", "round_bytes"]

ROUNDS = 2
"""Batches of a part that are under way at once: while one ends, the next moves."""


def round_bytes(action: Move, regions: Sequence[Region]) -> int | None:
    """Return the most bytes of a batch of this part; ``None``: it goes in one."""
    most = most_bytes(regions)
    return most if action.verb in (Verb.READ, Verb.WRITE) and action.plan.nbytes > most else None


class Direct(Job):
    """The plan's own runs, in one batch.

    Of a long part that is read or written, several batches, a few at a time: a library may move one after the other whatever it is
    given, and then a short part that comes later would wait for all of it. Batches that need another half are not cut.
    """

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        most = round_bytes(action, wire.regions)
        self._rest: Iterator[CopyPlan] = iter((action.plan,)) if most is None else action.plan.split(most)
        self._next = next(self._rest, None)

    @property
    def complete(self) -> bool:
        return self._next is None

    @property
    def submitting(self) -> bool:
        return self._next is not None and self.error is None

    def advance(self) -> None:
        while self._next is not None and self.error is None and self.my_turn and len(self.batches) < ROUNDS:
            plan, self._next = self._next, next(self._rest, None)
            if plan.nbytes:
                self._submit(self._batch(plan))

    def _batch(self, plan: CopyPlan) -> Batch | PlanBatch:
        verb, stream = self.action.verb, self.action.stream * PIECES
        if self.wire.transport.capabilities.factored:
            return PlanBatch(verb, self.wire.peer, CACHE, plan, CACHE, stream)
        runs = plan.runs()
        local, remote = (runs.dst, runs.src) if verb in (Verb.READ, Verb.RECV) else (runs.src, runs.dst)
        one_sided = verb in (Verb.READ, Verb.WRITE)
        return Batch(verb, self.wire.peer, CACHE, runs.length, local, CACHE, remote if one_sided else None, stream)
