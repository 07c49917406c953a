"""The back end: parts on their way, their bytes, and the many ways in which they end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvxfer import memory
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Move, Moved, PartRef
from kvxfer.transport import Verb
from tests.protocol.world.base import BLOCKS, D_TOKENS, LATEST, QUIET, UNIT, Agent, Link, Op, check

if TYPE_CHECKING:
    from tests.protocol.world.world import World


class Backend:
    def __init__(self, world: World) -> None:
        self.world = world
        self.ops: list[Op] = []

    def move(self, agent: Agent, move: Move) -> None:
        link = agent.links.get(move.ref.link)
        if link is None or not link.works:
            self._tell(
                agent, Moved(move.ref, Failure(FailureKind.PEER_LOST, "not connected"), True, 0, collateral=True)
            )
            return
        op = Op(agent, move.ref, move.verb, link, move.plan, move.stream, move.check)
        if agent.role == "producer":
            op.generation = self.world.prefills.heard[agent.rank, move.ref.transfer]
        self.ops = [o for o in self.ops if not o.done or not o.quiet or o.link.works] + [op]
        self.world.later(LATEST, None, lambda: self._advance(op, half=True))

    def abort(self, agent: Agent, ref: PartRef) -> None:
        for op in [o for o in self.ops if o.agent is agent and o.ref == ref and not o.done]:
            op.aborted = True
            self.world.later(1.0, None, lambda op=op: self._finish(op, "aborted", self._quiet()))
            if self.world.setting.scope == "peer":
                self._break(agent, op.link)

    def remote_writes_ended(self, agent: Agent, ref: PartRef) -> None:
        """The producer's half is over for good: what was lent for it is our own again."""
        for op in [o for o in self.ops if o.agent is agent and o.ref == ref and o.lends_memory]:
            self._finish(op, "acquitted", quiet=True)
            self._regain(op)

    def fail(self, agent: Agent, link: Link, why: str) -> None:
        """A link was closed here: what was moving on it ends."""
        for op in [o for o in self.ops if o.agent is agent and o.link is link]:
            self._finish(op, why, quiet=True, collateral=True)
            if op.lends_memory:
                self._regain(op)

    def _regain(self, op: Op) -> None:
        if not op.quiet:
            op.quiet = True
            self._tell(op.agent, Moved(op.ref, Failure(FailureKind.CANCELLED, "ended earlier"), True, 0))

    def check_quiet(self, agent: Agent, transfer: TransferId, generations: range) -> None:
        """The producer's memory of a transfer was given back: nothing of it may move."""
        for op in self.ops:
            mine = op.agent is agent and op.ref.transfer == transfer and op.generation in generations
            check(not mine or (op.done and op.quiet), f"{transfer} was released while {op.ref} moves")

    # --- inside ----------------------------------------------------------------------------------------------------

    def _advance(self, op: Op, half: bool = False) -> None:
        """Some of the bytes pass, or all."""
        if op.done:
            return
        if not op.link.works:
            self._finish(op, "the connection is gone", self._quiet(), collateral=op.link.closed)
            return
        if not self.world.calm and self.world.script.chance(4):
            self._finish(op, "the back end failed", self._quiet())
            return
        other = None
        if op.verb in (Verb.SEND, Verb.RECV):
            verb = Verb.RECV if op.verb is Verb.SEND else Verb.SEND
            same = (o for o in self.ops if o.link is op.link and o.verb is verb and o.stream == op.stream)
            other = next(same, None)
            if other is None:
                return  # goes on with its other half, or is aborted
            if other.aborted or other.done:
                self._finish(op, "the peer gave it up", self._quiet())
                return
        if op.verb is Verb.READ and op.agent is op.link.producer:
            self._serve(op)
            return
        if op.verb is Verb.WRITE and self.world.setting.staged and op.plan.nbytes:  # nothing is packed of nothing
            self._pass_on(op)
            return
        self._copy(op, half)
        if half:
            self.world.later(LATEST / 2, None, lambda: self._advance(op))
            return
        self._finish(op, None)
        if other is not None:
            self._finish(other, None)

    def _serve(self, op: Op) -> None:
        """The producer's half of a staged read ends when the consumer has taken all, or by an abort."""
        same = (o.ref for o in self.ops if o.link is op.link and o.agent is not op.agent and o.done)
        if any((r.attempt, r.part) == (op.ref.attempt, op.ref.part) for r in same):
            self._finish(op, None)
        else:
            self.world.later(LATEST, None, lambda: self._advance(op))

    def _pass_on(self, op: Op) -> None:
        """A staged write: the producer's half takes the bytes along once the consumer has lent it slots, the consumer's
        half has them when that is done."""
        halves = [o for o in self.ops if o.link is op.link and o.agent is not op.agent]
        other = next((o for o in halves if (o.ref.attempt, o.ref.part) == (op.ref.attempt, op.ref.part)), None)
        if not op.lends_memory and other is not None and not other.done:
            op.payload = bytes(op.link.producer.memory)
            self._finish(op, None)
        elif op.lends_memory and other is not None and other.payload is not None:
            self._copy(op, source=np.frombuffer(other.payload, np.uint8))
            self._finish(op, None)
        else:
            self.world.later(LATEST, None, lambda: self._advance(op))

    def _copy(self, op: Op, half: bool = False, source: np.ndarray | None = None) -> None:
        consumer, producer = op.link.consumer, op.link.producer
        runs = op.plan.runs()
        pairs = list(zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True))
        for s, d, n in pairs[: len(pairs) // 2] if half else pairs:
            for byte in range(d, d + n, D_TOKENS * UNIT):
                block = byte // (D_TOKENS * UNIT) % BLOCKS
                theirs = consumer.owner.get(block, "nobody") is consumer.tries.get(op.ref.attempt, "no attempt")
                consumer.written[consumer.owner.get(block)] = next(self.world.moments)
                check(theirs, f"{op.ref} writes into block {block}, which was given to somebody else")
            consumer.memory[d : d + n] = (producer.memory if source is None else source)[s : s + n]

    def _quiet(self) -> bool:
        return self.world.calm or not self.world.script.chance(64)

    def _finish(self, op: Op, error: str | None, quiet: bool = True, collateral: bool = False) -> None:
        if op.done:
            return
        # What was lent stays in the producer's hands until it says that it is done, or the link is closed.
        quiet = quiet if error is None or not op.lends_memory or collateral else error == "acquitted"
        op.done, op.quiet = True, quiet
        checksum = None
        if error is None and op.check is not None and self.world.setting.by_itself:
            checksum = memory.space(op.agent.cache.regions).checksum(op.check, "destination").value
        failure = None if error is None else Failure(FailureKind.BACKEND_FAILED, error)
        self._tell(op.agent, Moved(op.ref, failure, quiet, 0 if error else op.plan.nbytes, collateral, 1.0, checksum))
        if not quiet and not op.lends_memory:
            self.world.later(QUIET, None, lambda: self._calm(op))

    def _calm(self, op: Op) -> None:
        """The last bytes of something that failed pass, and then no more."""
        incoming = op.verb in (Verb.WRITE, Verb.RECV) or op.agent is op.link.consumer
        if incoming and op.link.consumer.alive and not op.link.closed:
            self._copy(op)
        op.quiet = True
        self._tell(op.agent, Moved(op.ref, Failure(FailureKind.CANCELLED, "ended earlier"), True, 0))

    def _tell(self, agent: Agent, moved: Moved) -> None:
        def tell() -> None:
            if agent.alive:
                self.world.perform(agent, agent.machine.moved(moved, self.world.now))

        self.world.later(0.2, ("moved", agent.epoch), tell)

    def _break(self, agent: Agent, link: Link) -> None:
        """An abort took all of its link along."""
        for o in [o for o in self.ops if o.link is link and not o.done and not o.aborted]:
            own = o.agent is agent
            self.world.later(1.0, None, lambda o=o, own=own: self._finish(o, "broken", self._quiet(), collateral=own))
        self.world.network.cut(link, again=True)
