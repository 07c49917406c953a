"""The consumer's half of a session as a sans-IO state machine: events in, actions out, the clock an argument.

A *fetch* is one request's load. It runs over one *lane* for each producer rank that holds something of it; its
outcome is the AND of its lanes. A lane lives like this (``docs/session.md`` draws it from ``TRANSITIONS``)::

    LINKING -> WANTING -> MOVING -> CHECKING -> DELIVERED

and every state but the last may end in FAILED. Outcome and release are two events: a fetch is released
only when no part of it is in flight any more, whatever its outcome.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import count

from kvxfer.errors import PeerError
from kvxfer.geometry import CopyPlan, PlanError
from kvxfer.session import messages as m
from kvxfer.session.parts import Table, covered, plan_part
from kvxfer.session.values import (
    Abort,
    Action,
    Close,
    Dial,
    Ended,
    Fetch,
    Kind,
    Lane,
    LinkId,
    LinkInfo,
    Move,
    Moved,
    Outcome,
    PartRef,
    Released,
    Report,
    Resolve,
    Resolved,
    Send,
    Source,
)
from kvxfer.transport import Verb

__all__ = ["TRANSITIONS", "Consumer", "State", "Stimulus"]


class State(enum.StrEnum):
    LINKING = "linking"  # the link is being made
    WANTING = "wanting"  # the producer knows what we want; nothing has come
    MOVING = "moving"  # parts are moving
    CHECKING = "checking"  # all bytes are here; the producer is asked whether they can be trusted
    PAUSED = "paused"  # the attempt is void; waiting for its parts to get quiet before the next
    DELIVERED = "delivered"
    FAILED = "failed"


class Stimulus(enum.StrEnum):
    LINK_UP = "link up"
    LINK_DOWN = "link down"
    HAVE = "have"
    COMPLETE = "all parts complete"
    VERDICT_OK = "verdict: held"
    VERDICT_NO = "verdict: not held"
    GONE = "gone"
    GONE_AGAIN = "gone, may come again"
    COLLATERAL = "link reset under a part"
    QUIET = "attempt quiet"
    FAIL = "error, deadline or cancel"


S, E = State, Stimulus
TRANSITIONS: dict[tuple[State, Stimulus], State] = {
    (S.LINKING, E.LINK_UP): S.WANTING,
    (S.WANTING, E.HAVE): S.MOVING,
    (S.WANTING, E.GONE_AGAIN): S.PAUSED,
    (S.MOVING, E.HAVE): S.MOVING,
    (S.MOVING, E.COMPLETE): S.CHECKING,
    (S.MOVING, E.GONE_AGAIN): S.PAUSED,
    (S.MOVING, E.COLLATERAL): S.PAUSED,
    (S.CHECKING, E.VERDICT_OK): S.DELIVERED,
    (S.CHECKING, E.GONE_AGAIN): S.PAUSED,
    (S.PAUSED, E.QUIET): S.LINKING,
    **{
        (s, e): S.FAILED
        for s in (S.LINKING, S.WANTING, S.MOVING, S.CHECKING, S.PAUSED)
        for e in (E.LINK_DOWN, E.VERDICT_NO, E.GONE, E.FAIL)
    },
}
"""Every pair that is not listed leaves the state alone: the stimulus is late, repeated or of an older attempt."""


@dataclass
class _Lane:
    spec: Lane
    state: State = State.LINKING
    attempt: int = 0
    generation: int = -1
    final: bool = False
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)  # part -> tokens, once it has arrived
    known: set[int] = field(default_factory=set)  # parts announced in this attempt
    flight: set[PartRef] = field(default_factory=set)  # parts of any attempt that may still touch memory
    owed: set[int] = field(default_factory=set)  # attempts whose Gone must come before peer writes have ended
    asked: float = 0.0  # when the last message that needs an answer went out

    def on(self, stimulus: Stimulus) -> bool:
        """Take a transition; false when the stimulus means nothing in this state."""
        after = TRANSITIONS.get((self.state, stimulus))
        if after is None:
            return False
        self.state = after
        return True


@dataclass
class _Fetch:
    spec: Fetch
    began: float
    deadline: float
    lanes: dict[LinkId, _Lane] | None = None  # None: the route is not known yet
    outcome: Outcome | None = None
    nbytes: int = 0

    @property
    def quiet(self) -> bool:
        return not any(lane.flight or lane.owed for lane in (self.lanes or {}).values())


class Consumer:
    """All fetches of one agent. Not thread-safe; every method returns the actions it asks for.

    ``timeout``: seconds from a fetch to its outcome. ``retry``: seconds after which an unanswered question is repeated.
    """

    def __init__(self, timeout: float, retry: float = 1.0) -> None:
        self._timeout, self._retry = timeout, retry
        self._attempts = count(1)
        self._fetches: dict[str, _Fetch] = {}
        self._routes: dict[Source, Resolved] = {}
        self._links: dict[LinkId, LinkInfo | None] = {}  # None: dialled, not up
        self._streams: dict[LinkId, int] = {}

    # --- from the engine -------------------------------------------------------------------------------------------

    def fetch(self, spec: Fetch, now: float) -> list[Action]:
        """Begin. Raises ``ValueError`` when the handle is in use."""
        if spec.handle in self._fetches:
            raise ValueError(f"a fetch named {spec.handle!r} is still alive")
        f = self._fetches[spec.handle] = _Fetch(spec, now, now + self._timeout)
        route = self._routes.get(spec.source)
        return [Resolve(spec.source, spec.own)] if route is None else self._start(f, route, now)

    def cancel(self, handle: str, reason: str, now: float) -> list[Action]:
        """The engine no longer wants it. Unknown handles are ignored."""
        f = self._fetches.get(handle)
        return [] if f is None else self._end(f, Outcome(Kind.CANCELLED, reason), now)

    # --- from the shell --------------------------------------------------------------------------------------------

    def resolved(self, source: Source, route: Resolved | str, now: float) -> list[Action]:
        """The route to a source, or why there is none."""
        out: list[Action] = []
        if isinstance(route, Resolved):
            self._routes[source] = route
        for f in [f for f in self._fetches.values() if f.spec.source == source and f.lanes is None and not f.outcome]:
            out += self._fail(f, route, now) if isinstance(route, str) else self._start(f, route, now)
        return out

    def forget(self, source: Source) -> None:
        """The engine behind a source is gone or has restarted: do not use its route again."""
        self._routes.pop(source, None)

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        self._links[link], self._streams[link] = info, 0
        out: list[Action] = []
        for f, lane in self._on_link(link):
            if lane.state is S.LINKING:
                lane.on(E.LINK_UP)
                out += self._want(f, lane, now)
        return out

    def link_down(self, link: LinkId, reason: str, now: float) -> list[Action]:
        """The link is lost: what was on it fails; its back-end connection is closed, so incoming writes have ended."""
        self._links.pop(link, None)
        out: list[Action] = [Close(link, reason)]
        for f, lane in self._on_link(link):
            lane.owed.clear()
            if lane.on(E.LINK_DOWN):
                self.forget(f.spec.source)
                out += self._fail(f, f"peer {link_name(link)} is lost: {reason}", now)
            out += self._release(f)
        return out

    def message(self, link: LinkId, msg: m.Message, now: float) -> list[Action]:
        """A message from the producer rank behind ``link``. Anything late, repeated or unknown changes nothing."""
        if not isinstance(msg, m.Have | m.Verdict | m.Gone):
            return []
        for f, lane in self._on_link(link):
            if f.spec.transfer == msg.transfer and isinstance(msg, m.Gone) and msg.attempt in lane.owed:
                lane.owed.discard(msg.attempt)
                return self._resume(f, lane, now) + self._release(f)
            if f.spec.transfer == msg.transfer and lane.attempt == msg.attempt and not f.outcome:
                match msg:
                    case m.Have():
                        return self._have(f, lane, msg, now)
                    case m.Verdict():
                        return self._verdict(f, lane, msg, now)
                    case m.Gone():
                        return self._gone(f, lane, msg, now)
        return []

    def moved(self, done: Moved, now: float) -> list[Action]:
        """A part has ended on this side."""
        for f, lane in self._on_link(done.ref.link):
            if done.ref not in lane.flight:
                continue
            if done.quiet:
                lane.flight.discard(done.ref)
            if done.error is None:
                f.nbytes += done.nbytes
            out: list[Action] = []
            if done.ref.attempt == lane.attempt and lane.state is S.MOVING:
                if done.collateral:
                    lane.on(E.COLLATERAL)
                    out += self._abort(lane) + self._redial(lane.spec.link)
                elif done.error is not None:
                    out += self._fail(f, f"moving a part from {link_name(done.ref.link)}: {done.error}", now)
                else:
                    out += self._complete(f, lane, now)
            return out + self._resume(f, lane, now) + self._release(f)
        return []

    def tick(self, now: float) -> list[Action]:
        """Deadlines and repeats. Call when ``next_tick`` is due."""
        out: list[Action] = []
        for f in list(self._fetches.values()):
            if f.outcome is None and now >= f.deadline:
                states = {str(lane.state) for lane in (f.lanes or {}).values()} or {"resolving"}
                out += self._fail(f, f"no outcome within {self._timeout:g} s (still {', '.join(sorted(states))})", now)
            for lane in (f.lanes or {}).values():
                if f.outcome is None and lane.state in (S.WANTING, S.CHECKING) and now >= lane.asked + self._retry:
                    out += self._ask(f, lane, now)
        return out

    def next_tick(self) -> float | None:
        """When ``tick`` has something to do next, or ``None``."""
        times = [f.deadline for f in self._fetches.values() if f.outcome is None]
        times += [
            lane.asked + self._retry
            for f in self._fetches.values() if f.outcome is None
            for lane in (f.lanes or {}).values() if lane.state in (S.WANTING, S.CHECKING)
        ]  # fmt: skip
        return min(times, default=None)

    @property
    def busy_links(self) -> set[LinkId]:
        """Links on which something is awaited: those worth a heartbeat."""
        return {
            link for f in self._fetches.values() for link, lane in (f.lanes or {}).items()
            if lane.flight or lane.owed or (f.outcome is None and lane.state not in (S.DELIVERED, S.FAILED))
        }  # fmt: skip

    def __len__(self) -> int:
        return len(self._fetches)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_link(self, link: LinkId) -> list[tuple[_Fetch, _Lane]]:
        return [(f, f.lanes[link]) for f in list(self._fetches.values()) if f.lanes and link in f.lanes]

    def _start(self, f: _Fetch, route: Resolved, now: float) -> list[Action]:
        f.lanes = {lane.link: _Lane(lane) for lane in route.lanes}
        out: list[Action] = []
        for link, lane in f.lanes.items():
            if self._links.get(link) is not None:
                lane.on(E.LINK_UP)
                out += self._want(f, lane, now)
            elif link not in self._links:
                out += self._redial(link)
        return out

    def _redial(self, link: LinkId) -> list[Action]:
        self._links[link] = None
        return [Dial(link)]

    def _want(self, f: _Fetch, lane: _Lane, now: float) -> list[Action]:
        lane.attempt, lane.generation, lane.final = next(self._attempts), -1, False
        lane.spans.clear()
        lane.known.clear()
        return self._ask(f, lane, now)

    def _ask(self, f: _Fetch, lane: _Lane, now: float) -> list[Action]:
        lane.asked = now
        spec = f.spec
        if lane.state is S.CHECKING:
            return [Send(lane.spec.link, m.Check(spec.transfer, lane.attempt, lane.generation))]
        blocks = tuple(m.pack_blocks(b) for b in spec.blocks)
        want = m.Want(
            spec.transfer, lane.attempt, spec.digest, spec.start, spec.tokens, blocks, lane.spec.readers
        )
        return [Send(lane.spec.link, want)]

    def _have(self, f: _Fetch, lane: _Lane, msg: m.Have, now: float) -> list[Action]:
        info = self._links.get(lane.spec.link)
        if info is None or msg.part in lane.known or lane.state not in (S.WANTING, S.MOVING):
            return []
        if lane.generation not in (-1, msg.generation):
            return self._fail(f, f"{link_name(lane.spec.link)} mixed generations in one attempt", now)
        lane.on(E.HAVE)
        lane.generation = msg.generation
        lane.known.add(msg.part)
        lane.final |= msg.final
        ref = PartRef("consumer", lane.spec.link, f.spec.transfer, lane.attempt, msg.part)
        lane.spans[msg.part] = (msg.lo, msg.hi)
        try:
            plan = self._plan(f, info, msg)
        except (PlanError, PeerError) as e:
            return self._fail(f, f"what {link_name(lane.spec.link)} has does not fit what is wanted: {e}", now)
        if info.mode == "write":
            f.nbytes += plan.nbytes
            return self._complete(f, lane, now)
        lane.flight.add(ref)
        verb = Verb.READ if info.mode == "read" else Verb.RECV
        return [Move(ref, verb, plan, msg.stream, msg.piece_bytes)]

    def _plan(self, f: _Fetch, info: LinkInfo, msg: m.Have) -> CopyPlan:
        src = tuple(m.unpack_blocks(b) for b in msg.blocks)
        dst: Table = f.spec.blocks
        return plan_part(info.planner, src, dst, f.spec.start, f.spec.tokens, msg.lo, msg.hi, msg.final)

    def _complete(self, f: _Fetch, lane: _Lane, now: float) -> list[Action]:
        """All parts of the attempt are here and cover what was wanted: ask whether they can be trusted."""
        if any(ref.attempt == lane.attempt for ref in lane.flight) or not lane.final:
            return []
        if not covered(lane.spans.values(), f.spec.start, f.spec.tokens) or not lane.on(E.COMPLETE):
            return []
        return self._ask(f, lane, now)

    def _verdict(self, f: _Fetch, lane: _Lane, msg: m.Verdict, now: float) -> list[Action]:
        if not msg.ok:
            lane.on(E.VERDICT_NO)
            return self._fail(f, f"{link_name(lane.spec.link)} cannot vouch for the bytes: {msg.reason}", now)
        if lane.on(E.VERDICT_OK) and f.lanes and all(x.state is S.DELIVERED for x in f.lanes.values()):
            return self._end(f, Outcome(Kind.DELIVERED), now)
        return []

    def _gone(self, f: _Fetch, lane: _Lane, msg: m.Gone, now: float) -> list[Action]:
        lane.attempt = 0  # the producer has nothing of it any more
        if not msg.again:
            lane.on(E.GONE)
            return self._fail(f, f"{link_name(lane.spec.link)} gave it up: {msg.reason}", now)
        if not lane.on(E.GONE_AGAIN):
            return []
        return self._abort(lane) + self._resume(f, lane, now)

    def _resume(self, f: _Fetch, lane: _Lane, now: float) -> list[Action]:
        """A paused lane whose parts are all quiet begins its next attempt."""
        if lane.state is not S.PAUSED or lane.flight or lane.owed or f.outcome:
            return []
        lane.on(E.QUIET)
        if self._links.get(lane.spec.link) is None:
            return []
        lane.on(E.LINK_UP)
        return self._want(f, lane, now)

    def _abort(self, lane: _Lane) -> list[Action]:
        return [Abort(ref) for ref in lane.flight]

    def _fail(self, f: _Fetch, reason: str, now: float) -> list[Action]:
        return self._end(f, Outcome(Kind.FAILED, reason), now)

    def _end(self, f: _Fetch, outcome: Outcome, now: float) -> list[Action]:
        """Fix the outcome once; stop whatever still moves."""
        if f.outcome is not None:
            return []
        f.outcome = outcome
        spec = f.spec
        out: list[Action] = [
            Report(Ended("consumer", spec.transfer, spec.handle, outcome, f.nbytes, now - f.began))
        ]
        for link, lane in (f.lanes or {}).items():
            info = self._links.get(link)
            if not outcome.delivered and lane.state is not S.DELIVERED:
                if lane.attempt and info is not None:
                    if info.mode == "write":
                        lane.owed.add(lane.attempt)
                    out.append(Send(link, m.Drop(spec.transfer, lane.attempt, outcome.reason)))
                lane.on(E.FAIL)
            out += self._abort(lane)
        return out + self._release(f)

    def _release(self, f: _Fetch) -> list[Action]:
        if f.outcome is None or not f.quiet or self._fetches.get(f.spec.handle) is not f:
            return []
        del self._fetches[f.spec.handle]
        return [Report(Released("consumer", f.spec.transfer, f.spec.handle))]


def link_name(link: LinkId) -> str:
    """A link as an operator would look for it."""
    return str(link[0]) if isinstance(link, tuple) else str(link)
