"""The consumer's half of a session as a sans-IO state machine: events in, actions out, the clock an argument.

A *fetch* is one request's load. It runs over one *lane* for each producer rank that holds something of it. It is delivered
when all lanes hold the same generation, and each producer rank still held that after the last byte of the last lane had
come. The life of a lane is the table ``life.LANE``. A lane may take several *attempts*:
when its link breaks or the producer's blocks change, the attempt is void, and the next begins once nothing of it
moves any more. Outcome and release are two events: a fetch is released only when nothing can touch its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.geometry import CopyPlan, PlanError
from kvxfer.identity import Source
from kvxfer.session import messages as m
from kvxfer.session.life import LaneEvent, LaneState
from kvxfer.session.loading import Load, Way
from kvxfer.session.parts import PIECE_LEAST, plan_part, to_hash
from kvxfer.session.timers import Timers
from kvxfer.session.values import (
    Abort,
    Acquit,
    Action,
    Close,
    Dial,
    Ended,
    Hash,
    Hashed,
    LinkId,
    LinkInfo,
    Move,
    Moved,
    PartRef,
    Released,
    Report,
    Resolve,
    Resolved,
    Send,
    in_order,
    link_name,
)
from kvxfer.transport import Verb
from kvxfer.values import Fetch

__all__ = ["Consumer"]

S, E, K = LaneState, LaneEvent, FailureKind

RESETS = 8
"""How often a lane is tried anew after its link broke under it."""

REMINDERS = 4
"""How often a producer is asked to stop writing into our memory before the link is closed instead."""


class Consumer:
    """All fetches of one agent. Not thread-safe; every method returns the actions it asks for.

    ``timeout``: seconds from a fetch to its outcome. ``retry``: seconds after which an unanswered question is repeated;
    the wait doubles each time. ``corrupt``: transfers that failed because other bytes arrived than were sent.
    """

    def __init__(self, timeout: float, retry: float = 1.0) -> None:
        self._timeout, self._retry = timeout, retry
        self.corrupt = 0
        self._closed: Failure | None = None
        self._attempts = count(1)
        self._fetches: dict[str, Load] = {}
        self._tries: dict[int, tuple[Load, Way]] = {}  # by a lane's last attempt
        self._routes: dict[Source, Resolved] = {}
        self._links: dict[LinkId, LinkInfo | None] = {}  # None: dialled, not up
        self._deadlines: Timers[str] = Timers()
        self._questions: Timers[int] = Timers()

    # --- from the engine -------------------------------------------------------------------------------------------

    def fetch(self, spec: Fetch, now: float, called: float | None = None) -> list[Action]:
        """Begin; its time runs from ``called`` (``None``: now). Raises ``ValueError`` when the handle is in use."""
        if spec.handle in self._fetches:
            raise ValueError(f"a fetch named {spec.handle!r} is still alive")
        began = now if called is None else called
        f = self._fetches[spec.handle] = Load(spec, began, began + self._timeout, began)
        if self._closed is not None:
            return self._fail(f, self._closed, now)
        self._deadlines.set(spec.handle, f.deadline)
        route = self._routes.get(spec.source)
        return [Resolve(spec.source, spec.own)] if route is None else self._start(f, route, now)

    def cancel(self, handle: str, reason: str, now: float) -> list[Action]:
        """The engine no longer wants it. Unknown handles are ignored."""
        f = self._fetches.get(handle)
        return [] if f is None else self._fail(f, Failure(K.CANCELLED, reason), now)

    def close(self, why: Failure, now: float) -> list[Action]:
        """Every fetch ends so, and each that is still to come; all links are given up."""
        self._closed = why
        out: list[Action] = []
        for f in list(self._fetches.values()):
            out += self._fail(f, why, now)
        for link in list(self._links):
            out += self._close(link, why)
        return out

    # --- from the shell --------------------------------------------------------------------------------------------

    def resolved(self, source: Source, route: Resolved | Failure, now: float) -> list[Action]:
        """The route to a source, or why there is none."""
        out: list[Action] = []
        if isinstance(route, Resolved):
            self._routes[source] = route
        for f in [f for f in self._fetches.values() if f.spec.source == source and f.lanes is None and not f.outcome]:
            out += self._start(f, route, now) if isinstance(route, Resolved) else self._fail(f, route, now)
        return out

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        """A link that was dialled is there."""
        if link not in self._links:
            return []
        self._links[link] = info
        out: list[Action] = []
        for f, lane in self._on_link(link):
            if lane.state is S.LINKING:
                out += self._want(f, lane, now)
            elif lane.state is S.CHECKING:
                out += self._ask(f, lane, now)
        return out

    def link_reset(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """The link broke and may be had again: attempts on it are void, and those who use it get another."""
        if self._links.get(link) is None:
            return []  # being dialled anew already, or of no interest
        lanes = list(self._on_link(link))
        out: list[Action] = []
        for f, lane in lanes:
            if lane.on(E.LINK_RESET):
                self._reopen(f)
                lane.resets += 1
                lane.broke = why
                self._questions.cancel(lane.attempt)
                if lane.resets > RESETS:
                    often = why.about(f"the link broke {lane.resets} times: ", link_name(link))
                    out += self._fail(f, often, now)
                out += [Abort(ref) for ref in in_order(lane.flight)]
        if any(lane.state in (S.LINKING, S.PAUSED, S.CHECKING, S.HELD) for _, lane in lanes):
            self._links[link] = None
            out.append(Dial(link))
        else:
            out += self._close(link, why)
        for f, lane in lanes:
            out += self._resume(f, lane, now)
        return out

    def link_down(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """The link is lost for good, and what was on it fails."""
        out = self._close(link, why)
        for f, lane in list(self._on_link(link)):
            if lane.on(E.LINK_DOWN):
                out += self._fail(f, why.about("", link_name(link)), now)
        return out

    def link_closed(self, link: LinkId, now: float) -> list[Action]:
        """What ``Close`` or ``Dial`` has closed is closed: nothing can come into our memory from there any more."""
        out: list[Action] = []
        for f, lane in list(self._on_link(link)):
            if lane.owed and lane.state in (S.PAUSED, S.FAILED, S.ARRIVED, S.CHECKING):
                out += self._acquit(f, lane, now)
        return out

    def message(self, link: LinkId, msg: m.Message, now: float) -> list[Action]:
        """A message from the producer rank behind ``link``. Anything late, repeated or unknown changes nothing."""
        if not isinstance(msg, m.Have | m.Sum | m.Verdict | m.Gone):
            return []
        f, lane = self._tries.get(msg.attempt, (None, None))
        if f is None or lane is None or lane.spec.link != link or f.spec.transfer != msg.transfer:
            return []
        match msg:
            case m.Have():
                return self._have(f, lane, msg, now)
            case m.Sum():
                lane.sum = msg.checksum
                return []
            case m.Verdict():
                return self._verdict(f, lane, msg, now)
            case m.Gone():
                return self._gone(f, lane, msg, now)

    def moved(self, done: Moved, now: float) -> list[Action]:
        """A part has ended on this side."""
        f, lane = self._tries.get(done.ref.attempt, (None, None))
        if f is None or lane is None or done.ref not in lane.flight:
            return []
        link, plan = done.ref.link, lane.to_hash.pop(done.ref, None)
        if done.failure is None:
            f.nbytes += done.nbytes
            lane.checksum += done.checksum or 0
            if plan is not None and done.checksum is None and lane.state is S.MOVING:
                return [Hash(done.ref, plan, "destination")]
        if done.quiet:
            lane.flight.discard(done.ref)
        out: list[Action] = []
        if lane.state is S.MOVING:
            if done.failure is None:
                out += self._complete(f, lane, now)
            elif done.collateral:
                out += self.link_reset(link, done.failure, now)
            elif lane.error is None:
                # If that is because the producer has ended its half, its Gone is on its way and says what follows.
                lane.error = done.failure
                self._questions.set(lane.attempt, now + self._retry)
        return out + self._resume(f, lane, now) + self._release(f)

    def hashed(self, done: Hashed, now: float) -> list[Action]:
        """What has arrived with a part has been read."""
        f, lane = self._tries.get(done.ref.attempt, (None, None))
        if f is None or lane is None or done.ref not in lane.flight:
            return []
        lane.flight.discard(done.ref)
        lane.checksum += done.value
        out: list[Action] = []
        if lane.state is S.MOVING and done.failure is not None:
            unchecked = done.failure.about("what has come cannot be checked: ", link_name(done.ref.link))
            out += self._fail(f, unchecked, now)
        elif lane.state is S.MOVING:
            out += self._complete(f, lane, now)
        return out + self._resume(f, lane, now) + self._release(f)

    def tick(self, now: float) -> list[Action]:
        """Deadlines and repeats. Call when ``next_tick`` is due."""
        out: list[Action] = []
        for handle in self._deadlines.due(now):
            f = self._fetches[handle]
            states = {str(lane) for lane in f.ways} or {f"looking for {f.spec.source}"}
            why = f"no outcome within {self._timeout:g} s (still {', '.join(sorted(states))})"
            peers = ", ".join(link_name(lane.spec.link) for lane in f.ways) or str(f.spec.source)
            out += self._fail(f, Failure(f.late, why, peers), now)
        for attempt in self._questions.due(now):
            f, lane = self._tries[attempt]
            out += self._ask(f, lane, now)
        return out

    def next_tick(self) -> float | None:
        """When ``tick`` has something to do next, or ``None``."""
        return min((t for t in (self._deadlines.next(), self._questions.next()) if t is not None), default=None)

    def __len__(self) -> int:
        return len(self._fetches)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_link(self, link: LinkId) -> Iterator[tuple[Load, Way]]:
        for f in self._fetches.values():
            lane = (f.lanes or {}).get(link)
            if lane is not None:
                yield f, lane

    def _start(self, f: Load, route: Resolved, now: float) -> list[Action]:
        f.lanes = {lane.link: Way(lane) for lane in route.lanes}
        if not f.lanes:
            return self._end(f, DELIVERED, now)  # this rank has nothing to fetch
        out: list[Action] = []
        for lane in f.lanes.values():
            out += self._link(f, lane, now)
        return out

    def _close(self, link: LinkId, why: Failure) -> list[Action]:
        """Give a link up. The way to what is behind it has to be looked up anew."""
        self._links.pop(link, None)
        self._routes = {s: r for s, r in self._routes.items() if all(lane.link != link for lane in r.lanes)}
        return [Close(link, why)]

    def _link(self, f: Load, lane: Way, now: float) -> list[Action]:
        """A lane in LINKING goes on if its link is up, else sees to it that it is being made."""
        link = lane.spec.link
        if self._links.get(link) is not None:
            return self._want(f, lane, now)
        if link in self._links:
            return []
        self._links[link] = None
        return [Dial(link)]

    def _want(self, f: Load, lane: Way, now: float) -> list[Action]:
        """Begin an attempt."""
        info = self._links[lane.spec.link]
        assert info is not None
        lane.on(E.LINK_UP)
        self._tries.pop(lane.attempt, None)
        lane.begin(next(self._attempts), owed=info.mode == "write", least=f.generation)
        self._tries[lane.attempt] = f, lane
        return self._ask(f, lane, now)

    def _ask(self, f: Load, lane: Way, now: float) -> list[Action]:
        """Put, or repeat, the question that a lane waits on. It has an answer, but messages die with their link."""
        self._questions.set(lane.attempt, now + self._retry * 2 ** min(lane.asked, 4))
        lane.asked += 1
        link = lane.spec.link
        if lane.state is S.CHECKING:
            return [Send(link, f.check(lane))] if self._links.get(link) is not None else []  # else once there is a link
        if lane.state is S.WANTING:
            return [Send(link, f.want(lane, now))]
        if lane.state is S.MOVING and lane.error is not None:
            # Nobody explains it. A back end has no word for a link that is of no more use, so none outlives an error.
            self._questions.cancel(lane.attempt)
            out = self._fail(f, lane.error.about("moving a part: ", link_name(link)), now)
            return out + self.link_reset(link, lane.error, now)
        if self._links.get(link) is None or lane.asked > REMINDERS:
            self._questions.cancel(lane.attempt)
            return self.link_reset(link, Failure(K.PEER_LOST, "it does not answer to a Drop", link_name(link)), now)
        return [Send(link, f.drop(lane))]

    def _have(self, f: Load, lane: Way, msg: m.Have, now: float) -> list[Action]:
        info = self._links.get(lane.spec.link)
        if info is None or msg.part in lane.spans or lane.error is not None:
            return []
        if lane.state in (S.WANTING, S.MOVING) and lane.generation not in (-1, msg.generation):
            return self._misused(f, lane, "it mixed generations in one attempt", now)
        if not lane.on(E.HAVE):
            return []
        if msg.generation < lane.least:
            return self._misused(f, lane, "it has an older generation than it was asked for", now)
        if msg.generation < f.generation:
            return self._outdate(f, lane, now)
        if msg.piece_bytes and not min(info.piece_bytes, PIECE_LEAST) <= msg.piece_bytes <= info.piece_bytes:
            return self._misused(f, lane, "it sends pieces of another size than was agreed on", now)
        self._questions.cancel(lane.attempt)
        f.heard = now
        lane.generation, lane.tally = msg.generation, msg.tally
        lane.final |= msg.final
        lane.spans[msg.part] = msg.lo, msg.hi
        try:
            plan = self._plan(f, info, msg)
        except PlanError as e:
            return self._misused(f, lane, f"what it has does not fit what is wanted: {e}", now)
        return self._newest(f, msg.generation, now) + self._take(f, lane, info, msg, plan, now)

    def _take(self, f: Load, lane: Way, info: LinkInfo, msg: m.Have, plan: CopyPlan, now: float) -> list[Action]:
        """See to it that a part that was announced comes."""
        ref = PartRef("consumer", lane.spec.link, f.spec.transfer, lane.attempt, msg.part)
        hashed = to_hash(plan, info, ref)
        if info.mode == "write" and not msg.piece_bytes:
            f.nbytes += plan.nbytes
            if hashed is None:
                return self._complete(f, lane, now)
            lane.flight.add(ref)
            return [Hash(ref, hashed, "destination")]
        lane.flight.add(ref)
        if hashed is not None:
            lane.to_hash[ref] = hashed
        verb = Verb.RECV if info.mode == "sendrecv" else Verb(info.mode)
        return [Move(ref, verb, plan, msg.stream, msg.piece_bytes, hashed)]

    def _plan(self, f: Load, info: LinkInfo, msg: m.Have) -> CopyPlan:
        return plan_part(
            info.planner, msg.blocks, f.spec.blocks, f.spec.start, f.spec.tokens, msg.lo, msg.hi, msg.final
        )

    def _newest(self, f: Load, generation: int, now: float) -> list[Action]:
        """A producer rank has announced this generation. What others have of an older one is of no use: wherever they lag,
        their engine has given it up."""
        f.generation = max(f.generation, generation)
        out: list[Action] = []
        for lane in f.ways:
            if 0 <= lane.generation < f.generation:
                out += self._outdate(f, lane, now)
        return out

    def _outdate(self, f: Load, lane: Way, now: float) -> list[Action]:
        """The attempt is void, since another lane has a newer generation: want that here, too."""
        if not lane.on(E.OUTDATED):
            return []
        self._reopen(f)
        lane.asked, lane.revoked = 0, True
        out = self._ask(f, lane, now)
        if not lane.owed:
            self._questions.cancel(lane.attempt)
        out += [Abort(ref) for ref in in_order(lane.flight)]
        return out + self._resume(f, lane, now)

    def _reopen(self, f: Load) -> None:
        """A lane begins anew, so its last byte is still to come, and what held in the others will have to have held until
        then."""
        for lane in f.ways:
            if lane.on(E.ANOTHER):
                self._questions.cancel(lane.attempt)

    def _complete(self, f: Load, lane: Way, now: float) -> list[Action]:
        """If all parts are here and cover what was wanted, this lane has arrived; once all have: see, or else ask, whether
        they can be trusted."""
        if not lane.complete(f.spec.start, f.spec.tokens):
            return []
        lane.on(E.COMPLETE)
        if any(x.state is not S.ARRIVED for x in f.ways):
            return []
        f.round += 1
        out: list[Action] = []
        for x in f.ways:
            if x.held(self._links.get(x.spec.link)):
                x.on(E.SEEN)
            else:
                x.on(E.ASK)
                x.asked = 0
                out += self._ask(f, x, now)
        return out + self._deliver(f, now)

    def _verdict(self, f: Load, lane: Way, msg: m.Verdict, now: float) -> list[Action]:
        if msg.round != f.round or not lane.on(E.VERDICT):
            return []
        self._questions.cancel(lane.attempt)
        lane.owed = False
        lane.counted = len(f.ways) == 1
        return self._deliver(f, now)

    def _deliver(self, f: Load, now: float) -> list[Action]:
        """If all lanes have held, that is the outcome. Producers only have to know that we have it; should one never hear of
        it, its lease ends."""
        if any(lane.state is not S.HELD for lane in f.ways):
            return []
        for lane in f.ways:
            lane.on(E.ALL_HELD)
        out = self._end(f, DELIVERED, now)
        return out + [Send(x.spec.link, f.done(x)) for x in f.ways if not x.counted and self._links.get(x.spec.link)]

    def _gone(self, f: Load, lane: Way, msg: m.Gone, now: float) -> list[Action]:
        out: list[Action] = []
        if not msg.again and lane.on(E.GONE):
            self.corrupt += msg.kind is K.CORRUPT
            out += self._fail(f, m.failure(msg, link_name(lane.spec.link)), now)
        elif msg.again and lane.on(E.GONE_AGAIN):
            lane.revoked |= msg.kind is K.REVOKED
            self._reopen(f)
            out += [Abort(ref) for ref in in_order(lane.flight)]
        if lane.owed:
            out += [Acquit(ref) for ref in in_order(lane.flight)]
        return out + self._acquit(f, lane, now)

    def _acquit(self, f: Load, lane: Way, now: float) -> list[Action]:
        """The producer has ended what it did for a void attempt."""
        lane.owed = False
        if lane.state in (S.PAUSED, S.FAILED):
            self._questions.cancel(lane.attempt)
        return self._resume(f, lane, now) + self._release(f)

    def _resume(self, f: Load, lane: Way, now: float) -> list[Action]:
        """A paused lane of which nothing moves any more begins its next attempt."""
        if lane.state is not S.PAUSED or not lane.quiet:
            return []
        lane.on(E.QUIET)
        return self._link(f, lane, now)

    def _fail(self, f: Load, why: Failure, now: float) -> list[Action]:
        return self._end(f, Outcome(why), now)

    def _misused(self, f: Load, lane: Way, what: str, now: float) -> list[Action]:
        """The producer broke the protocol."""
        return self._fail(f, Failure(K.MISUSE, what, link_name(lane.spec.link)), now)

    def _end(self, f: Load, outcome: Outcome, now: float) -> list[Action]:
        """Fix the outcome once; stop whatever still moves."""
        if f.outcome is not None:
            return []
        f.outcome = outcome
        spec = f.spec
        self._deadlines.cancel(spec.handle)
        ended = Ended(
            "consumer", spec.transfer, spec.handle, outcome, f.nbytes, now - f.began, f.generation, f.heard - f.began
        )
        out: list[Action] = [Report(ended)]
        for link, lane in (f.lanes or {}).items():
            if lane.state is S.DELIVERED:
                continue
            lane.on(E.FAIL)
            self._questions.cancel(lane.attempt)
            if lane.attempt and self._links.get(link) is not None:
                lane.asked = 0
                out += self._ask(f, lane, now)
                if not lane.owed:
                    self._questions.cancel(lane.attempt)
            out += [Abort(ref) for ref in in_order(lane.flight)]
        return out + self._release(f)

    def _release(self, f: Load) -> list[Action]:
        if f.outcome is None or not f.quiet or self._fetches.get(f.spec.handle) is not f:
            return []
        del self._fetches[f.spec.handle]
        for lane in (f.lanes or {}).values():
            self._tries.pop(lane.attempt, None)
        return [Report(Released("consumer", f.spec.transfer, f.spec.handle))]
