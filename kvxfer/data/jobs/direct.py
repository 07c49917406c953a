"""A part whose runs go as they are."""

from __future__ import annotations

from kvxfer.data.jobs.job import CACHE, PIECES, Job, Wire
from kvxfer.protocol.values import Move
from kvxfer.transport import Batch, PlanBatch, Verb

__all__ = ["Direct"]


class Direct(Job):
    """The plan's own runs in one batch."""

    def __init__(self, action: Move, wire: Wire) -> None:
        super().__init__(action, wire)
        self._begun = False

    @property
    def complete(self) -> bool:
        return self._begun

    @property
    def submitting(self) -> bool:
        return not self._begun and self.error is None

    def advance(self) -> None:
        if not self.submitting or not self.my_turn:
            return
        self._begun = True
        plan, verb = self.action.plan, self.action.verb
        if plan.nbytes == 0:
            return
        incoming = verb in (Verb.READ, Verb.RECV)
        stream = self.action.stream * PIECES
        if self.wire.transport.capabilities.factored:
            self._submit(PlanBatch(verb, self.wire.peer, CACHE, plan, CACHE, stream))
            return
        runs = plan.runs()
        local, remote = (runs.dst, runs.src) if incoming else (runs.src, runs.dst)
        one_sided = verb in (Verb.READ, Verb.WRITE)
        self._submit(
            Batch(verb, self.wire.peer, CACHE, runs.length, local, CACHE, remote if one_sided else None, stream)
        )
