"""What the consumer's machine keeps of a fetch: plain records."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import CopyPlan
from kvxfer.session import messages as m
from kvxfer.session.life import LANE, LaneEvent, LaneState
from kvxfer.session.parts import covered
from kvxfer.session.values import Lane, LinkId, LinkInfo, PartRef
from kvxfer.values import Fetch

__all__ = ["Load", "Way"]


NEWER = Failure(FailureKind.REVOKED, "a newer generation is wanted")
"""Why an attempt is void of which another rank of the producer has a newer generation."""


@dataclass
class Way:
    """A lane: what is fetched from one producer rank."""

    spec: Lane
    state: LaneState = LaneState.LINKING
    attempt: int = 0  # the last one begun; void when the state is PAUSED or FAILED
    least: int = -1  # the generation that was asked for, or a newer one
    generation: int = -1
    tally: int = -1  # the producer's, when it announced the first part
    final: bool = False
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # part -> tokens, of the parts announced
    flight: set[PartRef] = field(default_factory=set)  # parts of the attempt that may still touch memory, or read it
    to_hash: dict[PartRef, CopyPlan] = field(default_factory=dict)  # once they have arrived
    checksum: int = 0  # of all that has been hashed; checksums add up
    sum: bytes = b""  # the producer's, if it has said so
    error: Failure | None = None  # a part of the attempt could not be moved
    owed: bool = False  # the producer may write into our memory until it says Gone or the link is closed
    resets: int = 0
    broke: Failure | None = None  # why its link did, the last time
    revoked: bool = False  # an attempt was void since the producer had given its blocks up
    asked: int = 0  # how often the present question has been asked
    counted: bool = False  # the producer has said that it counts us as done

    def on(self, stimulus: LaneEvent) -> bool:
        """Take a transition; false when the stimulus means nothing in this state."""
        after = LANE.after(self.state, stimulus)
        if after is None:
            return False
        self.state = after
        return True

    def begin(self, attempt: int, owed: bool, least: int) -> None:
        """The next attempt: nothing is left of the one before."""
        self.least, self.counted = least, False
        self.attempt, self.generation, self.tally, self.final, self.error = attempt, -1, -1, False, None
        self.owed, self.asked, self.checksum, self.sum = owed, 0, 0, b""
        self.spans.clear()
        self.to_hash.clear()

    def __str__(self) -> str:
        return f"{self.state}, since its link broke: {self.broke.detail}" if self.broke else str(self.state)

    @property
    def quiet(self) -> bool:
        return not self.flight and not self.owed

    def complete(self, start: int, tokens: int) -> bool:
        """Whether all parts are here and cover what is wanted."""
        whole = self.final and covered(self.spans.values(), start, tokens)
        return whole and not self.flight and self.error is None

    def held(self, info: LinkInfo | None) -> bool:
        """Whether all that is here can be seen to be good, so that nobody has to be asked."""
        if info is None or info.tally is None or self.owed:
            return False
        same = info.integrity == "off" or self.sum == m.pack_checksum(self.checksum)
        return same and info.tally() == self.tally


@dataclass
class Load:
    """A fetch."""

    spec: Fetch
    began: float
    deadline: float
    heard: float  # when the last part was announced
    lanes: dict[LinkId, Way] | None = None  # None: the route is not known yet
    outcome: Outcome | None = None
    nbytes: int = 0
    generation: int = -1  # the newest that any lane has heard of; older ones are of no use
    round: int = 0  # how often all lanes had arrived

    @property
    def ways(self) -> Collection[Way]:
        return self.lanes.values() if self.lanes else ()

    def want(self, lane: Way, now: float) -> m.Want:
        """What a lane asks for."""
        s = self.spec
        left = max(self.deadline - now, 0.0)
        return m.Want(
            s.transfer, lane.attempt, s.digest, s.start, s.tokens, s.blocks, lane.spec.readers, left, lane.least
        )

    def check(self, lane: Way) -> m.Check:
        """What a lane says when all is here."""
        checksum, alone = m.pack_checksum(lane.checksum), len(self.ways) == 1
        return m.Check(self.spec.transfer, lane.attempt, lane.generation, checksum, self.round, alone)

    def done(self, lane: Way) -> m.Done:
        """What is said when all lanes have held."""
        return m.Done(self.spec.transfer, lane.attempt, self.spec.digest)

    def drop(self, lane: Way) -> m.Drop:
        """What is said when an attempt is void."""
        s = self.spec
        why = NEWER if self.outcome is None or self.outcome.failure is None else self.outcome.failure
        return m.Drop(s.transfer, lane.attempt, s.digest, why.kind, why.detail, self.outcome is None)

    @property
    def late(self) -> FailureKind:
        """What its deadline means, by what its lanes still wait for."""
        if not self.ways:
            return FailureKind.PEER_UNREACHABLE
        for lane in self.ways:
            if lane.state in (LaneState.LINKING, LaneState.PAUSED) and not lane.revoked:
                return FailureKind.PEER_LOST if lane.broke is not None else FailureKind.PEER_UNREACHABLE
        for lane in self.ways:
            if lane.state in (LaneState.WANTING, LaneState.LINKING, LaneState.PAUSED):
                return FailureKind.REVOKED if lane.revoked else FailureKind.NEVER_OFFERED
        return FailureKind.TIMED_OUT

    @property
    def quiet(self) -> bool:
        return all(lane.quiet for lane in self.ways)
