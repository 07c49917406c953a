"""What the consumer's machine keeps of a fetch: plain records."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvxfer.geometry import CopyPlan
from kvxfer.session.life import LANE, LaneEvent, LaneState
from kvxfer.session.values import Fetch, Lane, LinkId, Outcome, PartRef

__all__ = ["Load", "Way"]


@dataclass
class Way:
    """A lane: what is fetched from one producer rank."""

    spec: Lane
    state: LaneState = LaneState.LINKING
    attempt: int = 0  # the last one begun; void when the state is PAUSED or FAILED
    generation: int = -1
    final: bool = False
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # part -> tokens, of the parts announced
    flight: set[PartRef] = field(default_factory=set)  # parts of the attempt that may still touch memory, or read it
    to_hash: dict[PartRef, CopyPlan] = field(default_factory=dict)  # once they have arrived
    checksum: int = 0  # of all that has been hashed; checksums add up
    owed: bool = False  # the producer may write into our memory until it says Gone or the link is closed
    resets: int = 0
    asked: int = 0  # how often the present question has been asked

    def on(self, stimulus: LaneEvent) -> bool:
        """Take a transition; false when the stimulus means nothing in this state."""
        after = LANE.after(self.state, stimulus)
        if after is None:
            return False
        self.state = after
        return True

    @property
    def quiet(self) -> bool:
        return not self.flight and not self.owed


@dataclass
class Load:
    """A fetch."""

    spec: Fetch
    began: float
    deadline: float
    lanes: dict[LinkId, Way] | None = None  # None: the route is not known yet
    outcome: Outcome | None = None
    nbytes: int = 0

    @property
    def quiet(self) -> bool:
        return all(lane.quiet for lane in (self.lanes or {}).values())
