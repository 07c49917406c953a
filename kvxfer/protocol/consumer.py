"""The consumer's half of the protocol as a sans-IO state machine: events in, actions out, the clock an argument.

A *fetch* is one request's load. It has one *rank fetch* for each producer rank that holds something of it. It is delivered
when all rank fetches hold the same generation, and each producer rank still held that generation after the last byte of
the last rank had come. The life of a rank fetch is the table ``transitions.RANK_FETCH``. A rank fetch may take several
*attempts*: when its link breaks or the producer's blocks change, the attempt is void, and the next begins once nothing of it
moves any more. Outcome and release are two events: a fetch is released only when nothing can touch its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import assert_never

from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.geometry import CopyPlan, PlanError
from kvxfer.identity import Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.fetch_record import FetchRecord, RankFetch
from kvxfer.protocol.index import Index
from kvxfer.protocol.pace import LinkPace
from kvxfer.protocol.parts import PIECE_LEAST, Span, plan_part, to_hash
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.transitions import RankFetchEvent, RankFetchState
from kvxfer.protocol.values import (
    Abort,
    Action,
    Close,
    Dial,
    Emit,
    Ended,
    Hash,
    Hashed,
    LinkId,
    LinkInfo,
    Mode,
    Move,
    Moved,
    PartRef,
    Progress,
    Released,
    RemoteWritesEnded,
    Resolve,
    Resolved,
    Send,
    in_order,
    link_name,
)
from kvxfer.transport import Verb
from kvxfer.values import Fetch

__all__ = ["ConsumerMachine"]

S, E, K = RankFetchState, RankFetchEvent, FailureKind

RESETS = 8
"""How often a rank is tried anew after its link broke under it."""

VERBS: Mapping[Mode, Verb] = {"read": Verb.READ, "write": Verb.WRITE, "sendrecv": Verb.RECV}
"""How a part comes here, by the mode of its link."""

REMINDERS = 4
"""How often a producer is asked to stop writing into our memory before the link is closed instead."""


class ConsumerMachine:
    """All fetches of one agent.

    Not thread-safe. Methods that take an event return the actions that it asks for. ``now`` is the time in seconds, always by the
    same clock.

    Args:
        start: seconds from a fetch to its first part; the producer's queue may be long.
        timeout: seconds from its first part to its outcome.
        retry: seconds after which an unanswered question is repeated; the wait doubles each time.

    Attributes:
        corrupt: transfers that failed because other bytes arrived than were sent.
    """

    def __init__(self, start: float, timeout: float, retry: float = 1.0) -> None:
        self._start_s, self._timeout, self._retry = start, timeout, retry
        self.corrupt = 0
        self._closed: Failure | None = None
        self._attempts = count(1)
        self._fetches: dict[str, FetchRecord] = {}
        self._tries: dict[int, tuple[FetchRecord, RankFetch]] = {}  # by a rank's last attempt
        self._routes: dict[Source, Resolved] = {}
        self._prepared: set[Source] = set()  # whose links are to be made once there is a route
        self._behind: Index[LinkId, Source] = Index()  # whose route leads over a link
        self._seeking: Index[Source, str] = Index()  # fetches whose route is not known yet
        self._over: Index[LinkId, str] = Index()  # fetches that use a link
        self._links: dict[LinkId, LinkInfo | None] = {}  # None: dialled, not up
        self._paces: dict[LinkId, LinkPace] = {}  # of those over which something has come
        self._deadlines: Timers[str] = Timers()
        self._questions: Timers[int] = Timers()

    # --- from the engine -------------------------------------------------------------------------------------------

    def fetch(self, spec: Fetch, now: float, called: float | None = None) -> list[Action]:
        """Begin a fetch.

        Args:
            spec: what to fetch, and into which blocks.
            now: the time in seconds.
            called: when the engine asked for it, from which the time for its first part runs; ``None`` means now.

        Returns:
            The actions that follow.

        Raises:
            ValueError: the handle is that of a fetch that is still alive.
        """
        if spec.handle in self._fetches:
            raise ValueError(f"a fetch named {spec.handle!r} is still alive")
        began = now if called is None else called
        f = self._fetches[spec.handle] = FetchRecord(spec, began, began + self._start_s, began)
        if self._closed is not None:
            return self._fail(f, self._closed, now)
        self._deadlines.set(spec.handle, f.deadline)
        route = self._routes.get(spec.source)
        if route is not None:
            return self._start(f, route, now)
        self._seeking.add(spec.source, spec.handle)
        return [Resolve(spec.source, spec.own)]

    def prepare(self, source: Source, own: Source | None) -> list[Action]:
        """Make the links to a source from which fetches are to come. If there is no way, those will say so."""
        if self._closed is not None:
            return []
        route = self._routes.get(source)
        if route is not None:
            return self._dial(rank.link for rank in route.ranks)
        self._prepared.add(source)
        return [Resolve(source, own)]

    def cancel(self, handle: str, reason: str, now: float) -> list[Action]:
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
            out += self._close(link, why)
        return out

    # --- from the shell --------------------------------------------------------------------------------------------

    def resolved(self, source: Source, route: Resolved | Failure, now: float) -> list[Action]:
        """Take the route to a source, or the reason why there is none."""
        out: list[Action] = []
        if isinstance(route, Resolved):
            self._routes[source] = route
            for rank in route.ranks:
                self._behind.add(rank.link, source)
        for f in [self._fetches[handle] for handle in self._seeking.pop(source)]:
            out += self._start(f, route, now) if isinstance(route, Resolved) else self._fail(f, route, now)
        if source in self._prepared:
            self._prepared.remove(source)
            out += self._dial(rank.link for rank in route.ranks) if isinstance(route, Resolved) else []
        return out

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        """Use a link that was dialled and is up now."""
        if link not in self._links:
            return []
        self._links[link] = info
        out: list[Action] = []
        for f, rank in self._on_link(link):
            if rank.state is S.LINKING:
                out += self._request(f, rank, now)
            elif rank.state is S.COMMITTING:
                out += self._ask(f, rank, now)
        return out

    def link_reset(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """Void the attempts on a link that broke but can be made again, and dial it anew where it is still needed."""
        if self._links.get(link) is None:
            return []  # being dialled anew already, or of no interest
        ranks = list(self._on_link(link))
        out: list[Action] = []
        for f, rank in ranks:
            if rank.on(E.LINK_RESET):
                self._reopen(f)
                rank.resets += 1
                rank.broke = why
                self._questions.cancel(rank.attempt)
                if rank.resets > RESETS:
                    often = why.about(f"the link broke {rank.resets} times: ", link_name(link))
                    out += self._fail(f, often, now)
                out += [Abort(ref) for ref in in_order(rank.flight)]
        if any(rank.state in (S.LINKING, S.PAUSED, S.COMMITTING, S.HELD) for _, rank in ranks):
            self._links[link] = None
            out.append(Dial(link))
        else:
            out += self._close(link, why)
        for f, rank in ranks:
            out += self._resume(f, rank, now)
        return out

    def link_down(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """Fail what uses a link that is lost for good."""
        out = self._close(link, why)
        for f, rank in list(self._on_link(link)):
            if rank.on(E.LINK_DOWN):
                out += self._fail(f, why.about("", link_name(link)), now)
        return out

    def link_closed(self, link: LinkId, now: float) -> list[Action]:
        """Note that a link is closed, as ``Close`` or ``Dial`` asked: its producer can no longer write into our memory."""
        out: list[Action] = []
        for f, rank in list(self._on_link(link)):
            if rank.remote_writes and rank.state in (S.PAUSED, S.FAILED, S.ARRIVED, S.COMMITTING):
                out += self._remote_writes_ended(f, rank, now)
        return out

    def message(self, link: LinkId, msg: m.ToConsumer, now: float) -> list[Action]:
        """Handle a message from the producer rank behind ``link``. Anything late, repeated or unknown changes nothing."""
        f, rank = self._tries.get(msg.attempt, (None, None))
        if f is None or rank is None or rank.spec.link != link or f.spec.transfer != msg.transfer:
            return []
        match msg:
            case m.PartReady():
                return self._part_ready(f, rank, msg, now)
            case m.Checksums():
                rank.sum = msg.checksum
                return []
            case m.CommitAck():
                return self._commit_ack(f, rank, msg, now)
            case m.AttemptClosed():
                return self._attempt_closed(f, rank, msg, now)
            case _:
                assert_never(msg)

    def moved(self, done: Moved, now: float) -> list[Action]:
        """Handle the end of a part on this side."""
        f, rank = self._tries.get(done.ref.attempt, (None, None))
        if f is None or rank is None or done.ref not in rank.flight:
            return []
        link, plan = done.ref.link, rank.to_hash.pop(done.ref, None)
        if done.failure is None:
            f.nbytes += done.nbytes
            if link not in self._paces and link in self._links:
                self._paces[link] = LinkPace()
            if link in self._paces:
                self._paces[link].took(done.nbytes, done.seconds)
            rank.checksum += done.checksum or 0
            if plan is not None and done.checksum is None and rank.state is S.MOVING:
                return [Hash(done.ref, plan, "destination")]
        if done.quiet:
            rank.flight.discard(done.ref)
        out: list[Action] = []
        if rank.state is S.MOVING:
            if done.failure is None:
                out += self._complete(f, rank, now)
            elif done.collateral:
                out += self.link_reset(link, done.failure, now)
            elif rank.error is None:
                # If that is because the producer has ended its half, its AttemptClosed says what follows.
                rank.error = done.failure
                self._questions.set(rank.attempt, now + self._retry)
        return out + self._resume(f, rank, now) + self._release(f)

    def hashed(self, done: Hashed, now: float) -> list[Action]:
        """Handle the checksum of what has arrived with a part."""
        f, rank = self._tries.get(done.ref.attempt, (None, None))
        if f is None or rank is None or done.ref not in rank.flight:
            return []
        rank.flight.discard(done.ref)
        rank.checksum += done.value
        out: list[Action] = []
        if rank.state is S.MOVING and done.failure is not None:
            unchecked = done.failure.about("what has come cannot be checked: ", link_name(done.ref.link))
            out += self._fail(f, unchecked, now)
        elif rank.state is S.MOVING:
            out += self._complete(f, rank, now)
        return out + self._resume(f, rank, now) + self._release(f)

    def tick(self, now: float) -> list[Action]:
        """Handle deadlines and repeat questions. Call it when ``next_tick`` is due."""
        out: list[Action] = []
        for handle in self._deadlines.due(now):
            f = self._fetches[handle]
            states = ", ".join(sorted({str(rank) for rank in f.rank_fetches} or {f"looking for {f.spec.source}"}))
            why = f"nothing came within {self._start_s:g} s (still {states})"
            if f.begun:
                why = f"no outcome within {self._timeout:g} s of the first part (still {states})"
            peers = ", ".join(link_name(rank.spec.link) for rank in f.rank_fetches) or str(f.spec.source)
            out += self._fail(f, Failure(f.late, why, peers), now)
        for attempt in self._questions.due(now):
            f, rank = self._tries[attempt]
            out += self._ask(f, rank, now)
        return out

    def next_tick(self) -> float | None:
        """Return when ``tick`` has something to do next, or ``None``."""
        return min((t for t in (self._deadlines.next(), self._questions.next()) if t is not None), default=None)

    def __len__(self) -> int:
        return len(self._fetches)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _on_link(self, link: LinkId) -> Iterator[tuple[FetchRecord, RankFetch]]:
        for f in [self._fetches[handle] for handle in self._over.of(link)]:
            if f.ranks is not None:
                yield f, f.ranks[link]

    def _start(self, f: FetchRecord, route: Resolved, now: float) -> list[Action]:
        f.take(route.ranks)
        for rank in f.rank_fetches:
            self._over.add(rank.spec.link, f.spec.handle)
        if not f.rank_fetches:
            return self._end(f, DELIVERED, now)  # this rank has nothing to fetch
        out: list[Action] = []
        for rank in f.rank_fetches:
            out += self._link(f, rank, now)
        return out

    def _dial(self, links: Iterable[LinkId]) -> list[Action]:
        """Make those of these links that there are not."""
        new = [link for link in links if link not in self._links]
        self._links |= dict.fromkeys(new)
        return [Dial(link) for link in new]

    def _close(self, link: LinkId, why: Failure) -> list[Action]:
        """Give a link up. The route to what is behind it has to be looked up anew."""
        self._links.pop(link, None), self._paces.pop(link, None)
        for source in self._behind.pop(link):
            self._routes.pop(source, None)
        return [Close(link, why)]

    def _link(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Begin an attempt of a rank fetch in LINKING if its link is up, else see that the link is being made."""
        link = rank.spec.link
        if self._links.get(link) is not None:
            return self._request(f, rank, now)
        return self._dial([link])

    def _request(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Begin an attempt."""
        info = self._links[rank.spec.link]
        assert info is not None
        rank.on(E.LINK_UP)
        self._tries.pop(rank.attempt, None)
        rank.begin(next(self._attempts), remote_writes=info.mode == "write", least=f.least)
        self._tries[rank.attempt] = f, rank
        pace = self._paces.get(rank.spec.link)
        rank.banded = pace is not None and pace.slow((f.spec.tokens - f.spec.start) * info.planner.token_bytes)
        f.asked = now
        return self._ask(f, rank, now)

    def _ask(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Put, or repeat, the question that a rank fetch waits on.

        A producer answers each, but messages are lost with their link.
        """
        self._questions.set(rank.attempt, now + self._retry * 2 ** min(rank.asked, 4))
        rank.asked += 1
        link = rank.spec.link
        if rank.state is S.COMMITTING:
            return (
                [Send(link, f.commit_request(rank))] if self._links.get(link) is not None else []
            )  # else once there is a link
        if rank.state is S.REQUESTED:
            return [Send(link, f.fetch_request(rank, now, 0.0 if f.begun else self._timeout))]
        if rank.state is S.MOVING and rank.error is not None:
            # Nobody explains it. A back end has no word for a link that is of no more use, so none outlives an error.
            self._questions.cancel(rank.attempt)
            out = self._fail(f, rank.error.about("moving a part: ", link_name(link)), now)
            return out + self.link_reset(link, rank.error, now)
        if self._links.get(link) is None or rank.asked > REMINDERS:
            self._questions.cancel(rank.attempt)
            return self.link_reset(link, Failure(K.PEER_LOST, "it does not close the attempt", link_name(link)), now)
        return [Send(link, f.close_attempt(rank))]

    def _part_ready(self, f: FetchRecord, rank: RankFetch, msg: m.PartReady, now: float) -> list[Action]:
        info = self._links.get(rank.spec.link)
        if info is None or msg.part in rank.spans or rank.error is not None:
            return []
        if rank.state in (S.REQUESTED, S.MOVING) and rank.generation not in (None, msg.generation):
            return self._misused(f, rank, "it mixed generations in one attempt", now)
        if not rank.on(E.PART_READY):
            return []
        if msg.generation < rank.least:
            return self._misused(f, rank, "it has an older generation than it was asked for", now)
        if msg.generation < f.least:
            return self._outdate(f, rank, now)
        if msg.piece_bytes and not min(info.piece_bytes, PIECE_LEAST) <= msg.piece_bytes <= info.piece_bytes:
            return self._misused(f, rank, "it sends pieces of another size than was agreed on", now)
        if msg.bands is not None and not msg.bands[0] < msg.bands[1] <= info.planner.bands:
            return self._misused(f, rank, "it has bands of layers that there are not", now)
        self._questions.cancel(rank.attempt)
        f.heard = now
        if not f.begun:
            f.announced = now
            f.begun, f.deadline = True, now + self._timeout
            self._deadlines.set(f.spec.handle, f.deadline)
        rank.generation, rank.revocations = msg.generation, msg.revocations
        rank.end = msg.hi if msg.final else rank.end
        rank.payload = rank.payload or msg.payload
        rank.spans[msg.part], rank.bands = Span(msg.lo, msg.hi, msg.bands), info.planner.bands
        try:
            plan = self._plan(f, info, msg)
        except PlanError as e:
            return self._misused(f, rank, f"what it has does not fit what is wanted: {e}", now)
        return self._newest(f, msg.generation, now) + self._take(f, rank, info, msg, plan, now)

    def _take(
        self, f: FetchRecord, rank: RankFetch, info: LinkInfo, msg: m.PartReady, plan: CopyPlan, now: float
    ) -> list[Action]:
        """Ask for the actions by which an announced part arrives."""
        ref = PartRef("consumer", rank.spec.link, f.spec.transfer, rank.attempt, msg.part)
        hashed = to_hash(plan, info, ref)
        if info.mode == "write" and not msg.piece_bytes:
            f.nbytes += plan.nbytes
            if hashed is None:
                return self._complete(f, rank, now)
            rank.flight.add(ref)
            return [Hash(ref, hashed, "destination")]
        rank.flight.add(ref)
        if hashed is not None:
            rank.to_hash[ref] = hashed
        return [Move(ref, VERBS[info.mode], plan, msg.stream, msg.piece_bytes, hashed)]

    def _plan(self, f: FetchRecord, info: LinkInfo, msg: m.PartReady) -> CopyPlan:
        s = f.spec
        return plan_part(info.planner, msg.blocks, s.blocks, s.start, s.tokens, msg.lo, msg.hi, msg.final, msg.bands)

    def _newest(self, f: FetchRecord, generation: int, now: float) -> list[Action]:
        """Take a generation that a producer rank has announced.

        What other ranks hold of an older one is of no use: wherever they lag, their engine has given it up.
        """
        f.generation = max(f.least, generation)
        out: list[Action] = []
        for rank in f.rank_fetches:
            if rank.generation is not None and rank.generation < f.generation:
                out += self._outdate(f, rank, now)
        return out

    def _outdate(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Void the attempt, since another rank has a newer generation, and ask for that here, too."""
        if not rank.on(E.OUTDATED):
            return []
        self._reopen(f)
        rank.asked, rank.revoked = 0, True
        out = self._ask(f, rank, now)
        if not rank.remote_writes:
            self._questions.cancel(rank.attempt)
        out += [Abort(ref) for ref in in_order(rank.flight)]
        return out + self._resume(f, rank, now)

    def _reopen(self, f: FetchRecord) -> None:
        """Take back what other rank fetches of this fetch know to have held, because one of them begins anew.

        Its last byte is still to come, and the others will have to have held until then.
        """
        for rank in f.rank_fetches:
            if rank.on(E.ANOTHER):
                self._questions.cancel(rank.attempt)

    def _complete(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Note that a rank fetch has arrived, if all its parts are here and cover what was wanted.

        Once all have arrived, see whether they can be trusted, or else ask their producer ranks.
        """
        out = self._progress(f)
        if not rank.complete(f.spec.start, f.enough):
            return out
        rank.on(E.COMPLETE)
        if any(x.state is not S.ARRIVED for x in f.rank_fetches):
            return out
        f.round, f.arrived_at = f.round + 1, now
        for x in f.rank_fetches:
            if x.held(self._links.get(x.spec.link)):
                x.on(E.SEEN)
            else:
                x.on(E.ASK)
                x.asked = 0
                out += self._ask(f, x, now)
        return out + self._deliver(f, now)

    def _progress(self, f: FetchRecord) -> list[Action]:
        """Tell the engine how far its fetch is, if it has asked for that."""
        tokens = f.arrived if f.spec.progress else 0
        if tokens < max(f.progress, f.spec.start) + f.spec.progress or not tokens:
            return []
        f.progress = tokens
        return [Emit(Progress("consumer", f.spec.transfer, f.spec.handle, tokens))]

    def _commit_ack(self, f: FetchRecord, rank: RankFetch, msg: m.CommitAck, now: float) -> list[Action]:
        if msg.round != f.round or not rank.on(E.COMMIT_ACK):
            return []
        self._questions.cancel(rank.attempt)
        rank.remote_writes = False
        rank.counted = len(f.rank_fetches) == 1
        return self._deliver(f, now)

    def _deliver(self, f: FetchRecord, now: float) -> list[Action]:
        """End the fetch as delivered if all ranks have held.

        Producers only have to know that we have it; should one never hear of it, its lease ends.
        """
        if any(rank.state is not S.HELD for rank in f.rank_fetches):
            return []
        for rank in f.rank_fetches:
            rank.on(E.ALL_HELD)
        out = self._end(f, DELIVERED, now)
        return out + [
            Send(x.spec.link, f.committed(x)) for x in f.rank_fetches if not x.counted and self._links.get(x.spec.link)
        ]

    def _attempt_closed(self, f: FetchRecord, rank: RankFetch, msg: m.AttemptClosed, now: float) -> list[Action]:
        out: list[Action] = []
        if not msg.again and rank.on(E.CLOSED):
            self.corrupt += msg.kind is K.CORRUPT
            out += self._fail(f, m.failure(msg, link_name(rank.spec.link)), now)
        elif msg.again and rank.on(E.CLOSED_AGAIN):
            rank.revoked |= msg.kind is K.REVOKED
            self._reopen(f)
            out += [Abort(ref) for ref in in_order(rank.flight)]
        if rank.remote_writes:
            out += [RemoteWritesEnded(ref) for ref in in_order(rank.flight)]
        return out + self._remote_writes_ended(f, rank, now)

    def _remote_writes_ended(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Note that the producer has ended what it did for a void attempt."""
        rank.remote_writes = False
        if rank.state in (S.PAUSED, S.FAILED):
            self._questions.cancel(rank.attempt)
        return self._resume(f, rank, now) + self._release(f)

    def _resume(self, f: FetchRecord, rank: RankFetch, now: float) -> list[Action]:
        """Begin the next attempt of a paused rank fetch of which nothing moves any more."""
        if rank.state is not S.PAUSED or not rank.quiet:
            return []
        rank.on(E.QUIET)
        return self._link(f, rank, now)

    def _fail(self, f: FetchRecord, why: Failure, now: float) -> list[Action]:
        return self._end(f, Outcome(why), now)

    def _misused(self, f: FetchRecord, rank: RankFetch, what: str, now: float) -> list[Action]:
        """Fail a fetch whose producer broke the protocol."""
        return self._fail(f, Failure(K.MISUSE, what, link_name(rank.spec.link)), now)

    def _end(self, f: FetchRecord, outcome: Outcome, now: float) -> list[Action]:
        """Fix the outcome once, and stop whatever still moves."""
        if f.outcome is not None:
            return []
        f.outcome = outcome
        spec = f.spec
        self._deadlines.cancel(spec.handle)
        self._seeking.remove(spec.source, spec.handle)
        seconds, waited = now - f.began, f.heard - f.began
        payload, short = (f.payload, f.short) if outcome.delivered else (b"", None)
        more = f.generation, waited, payload, f.stages(now), short
        ended = Ended("consumer", spec.transfer, spec.handle, outcome, f.nbytes, seconds, *more)
        out: list[Action] = [Emit(ended)]
        for rank in f.rank_fetches:
            if rank.state is S.DELIVERED:
                continue
            rank.on(E.FAIL)
            self._questions.cancel(rank.attempt)
            if rank.attempt and self._links.get(rank.spec.link) is not None:
                rank.asked = 0
                out += self._ask(f, rank, now)
                if not rank.remote_writes:
                    self._questions.cancel(rank.attempt)
            out += [Abort(ref) for ref in in_order(rank.flight)]
        return out + self._release(f)

    def _release(self, f: FetchRecord) -> list[Action]:
        if f.outcome is None or self._fetches.get(f.spec.handle) is not f or not f.quiet:
            return []
        del self._fetches[f.spec.handle]
        for rank in f.rank_fetches:
            self._over.remove(rank.spec.link, f.spec.handle)
            self._tries.pop(rank.attempt, None)
        return [Emit(Released("consumer", f.spec.transfer, f.spec.handle))]
