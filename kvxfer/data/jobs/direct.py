"""Parts whose runs are moved as they are, without packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvxfer.data.jobs.job import CACHE, PIECES, Job, LinkContext
from kvxfer.geometry import CopyPlan
from kvxfer.protocol.values import Move
from kvxfer.transport import Batch, Capabilities, Completion, PlanBatch, Verb

ROUNDS = 2
"""The number of batches of a part in flight at once: while one ends, the next moves."""

SHARED, SHARED_BYTES = 32, 64 << 10
"""The most parts that share a batch, and the most bytes of each. They end together, so all of them must move in less time than a
message takes."""


def in_rounds(action: Move, most: int) -> bool:
    """Return whether a part is moved in several batches of at most ``most`` bytes each."""
    return action.plan.nbytes > most and action.verb in (Verb.READ, Verb.WRITE)


def shares(action: Move, can: Capabilities) -> bool:
    """Return whether a part may share a batch with others of its link: only if a failed batch leaves nothing behind."""
    alone = action.piece_bytes or can.factored or can.abort != "batch" or can.quiet != "batch"
    return not alone and action.verb is Verb.READ and 0 < action.plan.nbytes <= SHARED_BYTES


class Direct(Job):
    """The plan's own runs, in one batch.

    A long part that is read or written goes in several batches, a few at a time. A library may move batches one after the other,
    and a short part that comes later would have to wait for all of a long one. Two-sided batches are not cut.

    Short parts that are read may share a batch (``submit_together``). If that fails, each part that was not aborted is moved again
    in a batch of its own, so that an error or abort of one does not affect the others. Writes are not begun twice, because
    the bytes of the first time may still be on their way to the peer.
    """

    def __init__(self, action: Move, context: LinkContext) -> None:
        super().__init__(action, context)
        rounds = in_rounds(action, context.most)
        self._rest: Iterator[CopyPlan] = action.plan.split(context.most) if rounds else iter((action.plan,))
        self._next = next(self._rest, None)
        self._alone = True

    def shared(self, batch: int) -> None:
        """Record that the whole part moves in a batch with others."""
        self.batches[batch] = 0
        self._next, self._alone = None, False

    def completed(self, done: Completion) -> None:
        if done.error is None or self._alone or self.error is not None or not done.quiet or self.context.broken:
            super().completed(done)
        else:
            self.batches.pop(done.batch, None)
            self._next, self._alone = self.action.plan, True

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
                self._submit(self._batch(plan), plan.nbytes)

    def _batch(self, plan: CopyPlan) -> Batch | PlanBatch:
        verb, stream = self.action.verb, self.action.stream * PIECES
        if self.context.can.factored:
            return PlanBatch(verb, self.context.peer, CACHE, plan, CACHE, stream)
        runs = plan.runs()
        local, remote = (runs.dst, runs.src) if verb in (Verb.READ, Verb.RECV) else (runs.src, runs.dst)
        one_sided = verb in (Verb.READ, Verb.WRITE)
        return Batch(verb, self.context.peer, CACHE, runs.length, local, CACHE, remote if one_sided else None, stream)


def submit_together(jobs: Sequence[Direct]) -> None:
    """Submit parts of one link, none of which has begun, as one batch.

    Raises:
        BaseException: The back end refuses it; none has begun.
    """
    context, runs = jobs[0].context, CopyPlan.together([job.action.plan for job in jobs]).runs()
    number = context.transport.submit(Batch(Verb.READ, context.peer, CACHE, runs.length, runs.dst, CACHE, runs.src))
    context.batches[number] = jobs
    for job in jobs:
        job.shared(number)
