"""The consumer's half of the protocol as a sans-IO state machine: events in, actions out, the clock an argument.

A *fetch* is one request's load. It has one *rank fetch* for each producer rank that holds something of it. It is delivered
when all rank fetches have the same generation, and each producer rank still held that generation after the last byte of
the last rank had arrived. The life of a rank fetch is the table ``transitions.RANK_FETCH``. A rank fetch may take several
*attempts*: when its link breaks or the producer's blocks change, the attempt is void, and the next begins once nothing of it
moves any more. Outcome and release are two events: a fetch is released only once nothing can touch its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.geometry import PlanError
from kvxfer.identity import Generation, Handle, Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.attempts import Attempts
from kvxfer.protocol.fetch_record import FetchRecord, RankFetch
from kvxfer.protocol.routes import Routes
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.transitions import RankFetchEvent, RankFetchState
from kvxfer.protocol.values import (
    Action,
    Emit,
    Hash,
    Hashed,
    HeldUp,
    LinkId,
    LinkInfo,
    Moved,
    Moving,
    Released,
    Resolved,
    Send,
    link_name,
)
from kvxfer.values import Fetch

S, E, K = RankFetchState, RankFetchEvent, FailureKind

RESETS = 8
"""How often a rank is tried again after its link broke."""


class ConsumerMachine:
    """All fetches of one agent.

    Not thread-safe. Each method takes an event and returns the actions to be carried out. ``now`` is the time in seconds, always
    by the same clock.

    Args:
        start: Seconds that a fetch may wait for its first part; the producer's queue may be long.
        timeout: Seconds from its first part to its outcome.
        retry: Seconds after which an unanswered message is repeated; the wait doubles each time.
        hangs: Returns what all parts wait for, if this side moves nothing.
    """

    def __init__(
        self, start: float, timeout: float, retry: float = 1.0, hangs: Callable[[], HeldUp | None] = lambda: None
    ) -> None:
        self._start_s, self._timeout, self._hangs = start, timeout, hangs
        self.corrupt = 0
        self._closed: Failure | None = None
        self._fetches: dict[Handle, FetchRecord] = {}
        self._routes = Routes()
        self._links = self._routes.links
        self._attempts = Attempts(self._routes, timeout, retry)
        self._ask = self._attempts.ask
        self._deadlines: Timers[Handle] = Timers()

    # --- from the engine -------------------------------------------------------------------------------------------

    def fetch(self, spec: Fetch, now: float, called: float | None = None) -> list[Action]:
        """Begin a fetch; the time for its first part counts from ``called``, when the engine asked for it (``None``: now).

        Raises:
            ValueError: The handle belongs to a fetch that is still alive.
        """
        if spec.handle in self._fetches:
            raise ValueError(f"a fetch named {spec.handle!r} is still alive")
        began = now if called is None else called
        deadline = began + (spec.patience or self._start_s)
        f = self._fetches[spec.handle] = FetchRecord(spec, began, deadline, began)
        if self._closed is not None:
            return self._fail(f, self._closed, now)
        self._deadlines.set(spec.handle, f.deadline)
        route = self._routes.get(spec.source)
        return self._routes.seek(f) if route is None else self._start(f, route, now)

    def prepare(self, source: Source, own: Source | None) -> list[Action]:
        """Make the links to a source before the first fetch from it. If that fails, the fetch will say so."""
        return [] if self._closed is not None else self._routes.prepare(source, own)

    def cancel(self, handle: Handle, reason: str, now: float) -> list[Action]:
        """End a fetch that the engine no longer wants. Unknown handles are ignored."""
        f = self._fetches.get(handle)
        return [] if f is None else self._fail(f, Failure(K.CANCELLED, reason), now)

    def close(self, why: Failure, now: float) -> list[Action]:
        """Fail every fetch, present or still to come, with ``why``, and give all links up."""
        self._closed = why
        out: list[Action] = []
        for f in list(self._fetches.values()):
            out += self._fail(f, why, now)
        for link in list(self._links):
            out += self._routes.close(link, why)
        return out

    # --- from the runtime ------------------------------------------------------------------------------------------

    def resolved(self, source: Source, route: Resolved | Failure, now: float) -> list[Action]:
        """Handle the route to a source, or the reason why there is none."""
        out: list[Action] = []
        for f in self._routes.resolved(source, route):
            out += self._start(f, route, now) if isinstance(route, Resolved) else self._fail(f, route, now)
        out += self._routes.prepared(source)
        return out + (self._routes.unused(route) if isinstance(route, Resolved) else [])

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        """Use a link that was dialled and is up now."""
        out: list[Action] = []
        for f, rank in self._routes.up(link, info):
            if rank.state is S.LINKING:
                out += self._attempts.begin(f, rank, now)
            elif rank.state is S.COMMITTING:
                out += self._ask(f, rank, now)
        return out

    def link_reset(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """Void the attempts on a link that broke but can be made again, and dial it again if it is still needed."""
        if self._links.get(link) is None:
            return []  # being dialled again already, or no longer needed
        ranks = self._routes.users(link)
        out: list[Action] = []
        for f, rank in ranks:
            if rank.on(E.LINK_RESET):
                self._reopen(f)
                rank.resets += 1
                rank.broke = why
                self._attempts.answered(rank)
                if rank.resets > RESETS:
                    out += self._fail(f, why.about(f"the link broke {rank.resets} times: ", link_name(link)), now)
                out += rank.aborts
        if any(rank.state in (S.LINKING, S.PAUSED, S.COMMITTING, S.HELD) for _, rank in ranks):
            out += self._routes.redial(link)
        else:
            out += self._routes.close(link, why)
        for f, rank in ranks:
            out += self._attempts.resume(f, rank, now)
        return out

    def link_down(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """Fail what uses a link that cannot be dialled again."""
        out = self._routes.close(link, why)
        for f, rank in self._routes.users(link):
            if rank.on(E.LINK_DOWN):
                out += self._fail(f, rank.lost(why).about("", link_name(link)), now)
        return out

    def link_closed(self, link: LinkId, now: float) -> list[Action]:
        """Record that a link is closed, as ``Close`` or ``Dial`` asked: its producer can no longer write into memory here."""
        out: list[Action] = []
        for f, rank in self._routes.users(link):
            if rank.remote_writes and rank.state in (S.PAUSED, S.FAILED, S.ARRIVED, S.COMMITTING):
                out += self._remote_writes_ended(f, rank, now)
        return out

    def message(self, link: LinkId, msg: m.ToConsumer, now: float) -> list[Action]:
        """Handle a message from the producer rank behind ``link``. Anything late, repeated or unknown changes nothing."""
        f, rank = self._attempts.tries.get(msg.attempt, (None, None))
        if f is None or rank is None or rank.spec.link != link or f.spec.transfer != msg.transfer:
            return []
        match msg:
            case m.PartReady():
                return self._part_ready(f, rank, msg, now)
            case m.Underway():
                return self._underway(f, rank, msg, now)
            case m.Checksums():
                rank.sum = msg.checksum
                return []
            case m.CommitAck():
                return self._commit_ack(f, rank, msg, now)
            case m.AttemptClosed():
                return self._attempt_closed(f, rank, msg, now)
            case _:
                assert_never(msg)

    def pace(self, link: LinkId) -> float:
        """Return how many bytes a second come over a link that this side moves them over; 0 if that is not known. Any thread."""
        info, pace = self._links.get(link), self._routes.paces.get(link)
        return 0.0 if info is None or pace is None or info.mode == "write" else pace.bytes_per_s

    def moved(self, done: Moved, now: float) -> list[Action]:
        """Handle the end of a part on this side."""
        f, rank = self._attempts.tries.get(done.ref.attempt, (None, None))
        if f is None or rank is None or done.ref not in rank.flight:
            return []
        plan = rank.came(done)
        if done.failure is None:
            f.nbytes += done.nbytes
            f.came(now)
            self._routes.moved(done, now)
            if plan is not None:
                return [Hash(done.ref, plan, "destination")]
        if done.quiet:
            del rank.flight[done.ref]
        if rank.state is not S.MOVING:
            return self._attempts.resume(f, rank, now) + self._release(f)
        if done.failure is None:
            return self._complete(f, rank, now)
        if done.collateral:
            return self.link_reset(done.ref.link, done.failure, now)
        if rank.error is None:
            # If that is because the producer has ended its half, its AttemptClosed says what follows.
            rank.error = done.failure
            self._attempts.expect(rank, now)
        return []

    def moving(self, news: Moving, now: float) -> None:
        """Record how far parts have got that are still on their way."""
        for ref, nbytes in news.parts:
            f, rank = self._attempts.tries.get(ref.attempt, (None, None))
            if f is not None and rank is not None and ref in rank.flight:
                rank.coming[ref] = nbytes
                f.came(now)
        for ref, why in news.held_up:
            _, rank = self._attempts.tries.get(ref.attempt, (None, None))
            if rank is not None and ref in rank.flight:
                rank.held_up = why

    def hashed(self, done: Hashed, now: float) -> list[Action]:
        """Handle the checksum of what has arrived with a part."""
        f, rank = self._attempts.tries.get(done.ref.attempt, (None, None))
        if f is None or rank is None or done.ref not in rank.flight:
            return []
        del rank.flight[done.ref]
        rank.checksum += done.value
        if rank.state is not S.MOVING:
            return self._attempts.resume(f, rank, now) + self._release(f)
        why = done.failure and done.failure.about(
            "the bytes that arrived cannot be checked: ", link_name(done.ref.link)
        )
        return self._complete(f, rank, now) if why is None else self._fail(f, why, now)

    def tick(self, now: float) -> list[Action]:
        """Handle deadlines and repeat messages. Call it when ``next_tick`` is due."""
        out: list[Action] = []
        for handle in self._deadlines.due(now):
            f = self._fetches[handle]
            out += self._fail(f, f.overdue(self._start_s, self._timeout), now)
        for f, rank in self._attempts.due(now):
            why = self._attempts.hopeless(rank)
            if why is None:
                out += self._ask(f, rank, now)
                continue
            if rank.state is S.MOVING:
                out += self._fail(f, why.about("moving a part: ", link_name(rank.spec.link)), now)
            out += self.link_reset(rank.spec.link, why, now)
        return out

    def next_tick(self) -> float | None:
        """Return when ``tick`` next has something to do, or ``None``."""
        return min((t for t in (self._deadlines.next(), self._attempts.next()) if t is not None), default=None)

    def __len__(self) -> int:
        return len(self._fetches)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _start(self, f: FetchRecord, route: Resolved, now: float) -> list[Action]:
        f.take(route.ranks)
        self._routes.use(f)
        if not f.rank_fetches:
            return self._end(f, DELIVERED, now)  # this rank has nothing to fetch
        return [action for rank in f.rank_fetches for action in self._attempts.begin(f, rank, now)]

    def _part_ready(self, f: FetchRecord, rank: RankFetch, msg: m.PartReady, now: float) -> list[Action]:
        info = self._links.get(rank.spec.link)
        if info is None or msg.part in rank.spans or rank.error is not None or not rank.on(E.PART_READY):
            return []
        if (wrong := rank.misuse(msg, info, f.spec)) is not None:
            return self._fail(f, wrong, now)
        if msg.generation < f.least:
            return self._outdate(f, rank, now)
        self._attempts.answered(rank)
        f.heard = now
        self._begun(f, now)
        rank.announced(msg, info)
        try:
            plan = f.plan(msg, info)
        except PlanError as e:
            why = f"its blocks do not fit those to be filled: {e}"
            return self._fail(f, Failure(K.MISUSE, why, link_name(rank.spec.link)), now)
        out = self._newest(f, msg.generation, now)
        if info.mode == "write" and not msg.piece_bytes:
            f.nbytes += plan.nbytes
            rank.came_bytes += plan.nbytes
            f.came(now)
        return out + (rank.take(msg, info, plan) or self._complete(f, rank, now))

    def _begun(self, f: FetchRecord, now: float) -> None:
        """Record that something is on its way; from the first time on, the deadline is the one for the outcome."""
        f.moving_since = now if f.moving_since is None else f.moving_since
        if not f.begun:
            f.announced = now
            f.begun, f.deadline = True, now + self._timeout
            self._deadlines.set(f.spec.handle, f.deadline)

    def _underway(self, f: FetchRecord, rank: RankFetch, msg: m.Underway, now: float) -> list[Action]:
        """Record how much a producer has written of parts of which this side sees nothing before they have come."""
        if rank.state in (S.REQUESTED, S.MOVING) and rank.remote_writes:
            self._begun(f, now)
            if rank.underway(msg):
                f.came(now)
        return []

    def _newest(self, f: FetchRecord, generation: Generation, now: float) -> list[Action]:
        """Record a generation that a producer rank has announced.

        What other ranks hold of an older one is useless: even if they do not know it yet, their engine has given it up.
        """
        f.generation = max(f.least, generation)
        out: list[Action] = []
        for rank in f.rank_fetches:
            if rank.generation is not None and rank.generation < f.generation:
                out += self._outdate(f, rank, now)
        return out

    def _outdate(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Void the attempt, because another rank has a newer generation, and ask this rank for that too."""
        if not rank.on(E.OUTDATED):
            return []
        self._reopen(f)
        rank.revoked = True
        return self._attempts.give_up(f, rank, now) + self._attempts.resume(f, rank, now)

    def _reopen(self, f: FetchRecord) -> None:
        """Void the commits of the other rank fetches of this fetch, because one of them begins again.

        Its last byte is still to come, and the generation must hold on all ranks until then.
        """
        for rank in f.rank_fetches:
            if rank.on(E.ANOTHER):
                self._attempts.answered(rank)

    def _complete(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Record that a rank fetch has arrived, if all its parts are here and cover what was wanted.

        Once all rank fetches have arrived, check whether they can be trusted, or ask their producer ranks.
        """
        complete = rank.complete(f.spec.start, f.enough) and rank.on(E.COMPLETE)
        if not complete or not f.all_are(S.ARRIVED):
            f.part_over(now)
            return []
        f.round, f.arrived_at = f.round + 1, now
        out: list[Action] = []
        for x in f.rank_fetches:
            if x.held(self._links.get(x.spec.link)):
                x.on(E.SEEN)
            else:
                x.on(E.ASK)
                x.asked = 0
                out += self._ask(f, x, now)
        return out + self._deliver(f, now)

    def _commit_ack(self, f: FetchRecord, rank: RankFetch, msg: m.CommitAck, now: float) -> list[Action]:
        if msg.round != f.round or not rank.on(E.COMMIT_ACK):
            return []
        self._attempts.answered(rank)
        rank.remote_writes = False
        rank.counted = len(f.rank_fetches) == 1
        return self._deliver(f, now)

    def _deliver(self, f: FetchRecord, now: float) -> list[Action]:
        """End the fetch as delivered if its generation held on all ranks.

        Producers are told, so that they can free their blocks; if the message is lost, their lease ends.
        """
        if not f.all_are(S.HELD):
            return []
        for rank in f.rank_fetches:
            rank.on(E.ALL_HELD)
        out = self._end(f, DELIVERED, now)
        for rank in f.rank_fetches:
            if not rank.counted and self._links.get(rank.spec.link):
                out.append(Send(rank.spec.link, f.committed(rank)))
        return out

    def _attempt_closed(self, f: FetchRecord, rank: RankFetch, msg: m.AttemptClosed, now: float) -> list[Action]:
        out: list[Action] = []
        if not msg.again and rank.on(E.CLOSED):
            self.corrupt += msg.kind is K.CORRUPT
            out += self._fail(f, m.failure(msg, link_name(rank.spec.link)), now)
        elif msg.again and rank.on(E.CLOSED_AGAIN):
            rank.revoked |= msg.kind is K.REVOKED
            self._reopen(f)
            out += rank.aborts
        return out + rank.written + self._remote_writes_ended(f, rank, now)

    def _remote_writes_ended(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Record that the producer no longer writes for a void attempt."""
        rank.remote_writes = False
        if rank.state in (S.PAUSED, S.FAILED):
            self._attempts.answered(rank)
        return self._attempts.resume(f, rank, now) + self._release(f)

    def _fail(self, f: FetchRecord, why: Failure, now: float) -> list[Action]:
        return [] if f.outcome is not None else self._end(f, Outcome(f.explain(why, now, self._hangs())), now)

    def _end(self, f: FetchRecord, outcome: Outcome, now: float) -> list[Action]:
        """Set the outcome, unless it is set already, and stop whatever still moves."""
        if f.outcome is not None:
            return []
        f.outcome = outcome
        self._deadlines.cancel(f.spec.handle)
        out: list[Action] = [Emit(f.ended(now))]
        for rank in f.rank_fetches:
            if rank.state is not S.DELIVERED:
                rank.on(E.FAIL)
                out += self._attempts.give_up(f, rank, now)
        return out + self._release(f)

    def _release(self, f: FetchRecord) -> list[Action]:
        if f.outcome is None or self._fetches.get(f.spec.handle) is not f or not f.quiet:
            return []
        del self._fetches[f.spec.handle]
        self._routes.leave(f)
        for rank in f.rank_fetches:
            self._attempts.forget(rank)
        return [Emit(Released("consumer", f.spec.transfer, f.spec.handle))]
