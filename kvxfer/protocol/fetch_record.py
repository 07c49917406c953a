"""What the consumer's machine keeps of a fetch: plain records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import field

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import CopyPlan
from kvxfer.identity import FIRST, Generation
from kvxfer.protocol import messages as m
from kvxfer.protocol.parts import MIN_PIECE, Span, placed, plan_part, reached, to_hash
from kvxfer.protocol.progress import enriched
from kvxfer.protocol.transitions import RANK_FETCH, RankFetchEvent, RankFetchState
from kvxfer.protocol.values import (
    Abort,
    Action,
    Ended,
    Hash,
    HeldUp,
    LinkId,
    LinkInfo,
    Mode,
    Move,
    Moved,
    PartRef,
    RankRoute,
    RemoteWritesEnded,
    in_order,
    link_name,
)
from kvxfer.transitions import Life
from kvxfer.transport import Verb
from kvxfer.values import Fetch, Stages

VERBS: Mapping[Mode, Verb] = {"read": Verb.READ, "write": Verb.WRITE, "sendrecv": Verb.RECV}
"""The verb by which a part comes to this side, by the mode of its link."""

NEWER = Failure(FailureKind.REVOKED, "a newer generation is wanted")
"""Why an attempt is void if another rank of the producer has a newer generation."""


class RankFetch(msgspec.Struct, Life[RankFetchState, RankFetchEvent], eq=False, gc=False):
    """The share of a fetch that comes from one producer rank."""

    table = RANK_FETCH

    spec: RankRoute
    state: RankFetchState = RankFetchState.LINKING
    attempt: int = 0  # the last one begun; void when the state is PAUSED or FAILED
    least: Generation = FIRST  # older ones are of no use
    generation: Generation | None = None
    revocations: int | None = None  # the producer's, when it announced the first part
    end: int | None = None  # where the final part ends, once it has been announced
    spans: dict[int, Span] = field(default_factory=dict)  # of the parts announced, by their numbers
    bands: int = 1  # of the producer's layers
    told_tokens: int = 0  # of the parts announced, each token once for each band
    banded: bool = False  # parts of single bands are asked for
    flight: dict[PartRef, None] = field(default_factory=dict)  # parts of the attempt that may touch or read memory
    to_hash: dict[PartRef, CopyPlan] = field(default_factory=dict)  # once they have arrived
    came_bytes: int = 0  # of the attempt's parts that have arrived
    announced_bytes: int = 0  # of all of its parts
    coming: dict[PartRef, int] = field(default_factory=dict)  # of parts that take long: the bytes that have come
    told_moved: int = 0  # the bytes that the producer says it has written
    told_bytes: int = 0  # the bytes of the parts that it has begun
    checksum: int = 0  # of all that has been hashed; checksums add up
    sum: bytes = b""  # the producer's, if it has said so
    payload: bytes = b""  # what came with the final part
    error: Failure | None = None  # a part of the attempt could not be moved
    held_up: HeldUp | None = None  # what one waits for that stands still
    remote_writes: bool = False  # the producer may write here until it sends AttemptClosed or the link closes
    resets: int = 0
    broke: Failure | None = None  # why its link broke last
    revoked: bool = False  # an attempt was void because the producer had given its blocks up
    asked: int = 0  # how often the present message has been sent
    counted: bool = False  # the producer has confirmed that it counts this reader as done

    def begin(self, attempt: int, remote_writes: bool, least: Generation) -> None:
        """Begin the next attempt; nothing is left of the one before."""
        self.least, self.counted = least, False
        self.attempt, self.generation, self.revocations, self.end, self.error = attempt, None, None, None, None
        self.remote_writes, self.asked, self.checksum, self.sum, self.payload = remote_writes, 0, 0, b"", b""
        self.came_bytes = self.announced_bytes = self.told_moved = self.told_bytes = self.told_tokens = 0
        self.held_up = None
        self.spans.clear()
        self.to_hash.clear()
        self.coming.clear()

    def misuse(self, msg: m.PartReady, info: LinkInfo, fetch: Fetch) -> Failure | None:
        """Count what an announcement tells; return how it breaks the protocol, or ``None``. To tell a token twice is misuse."""
        wanted = (fetch.tokens - fetch.start) * (bands := info.planner.bands)
        first, past = msg.bands or (0, bands)
        lo = msg.lo if msg.lo > fetch.start else fetch.start
        hi = msg.hi if msg.hi < fetch.tokens else fetch.tokens
        self.told_tokens += (hi - lo) * (past - first) if hi > lo else 0
        if self.generation not in (None, msg.generation):
            what = "it mixed generations in one attempt"
        elif msg.generation < self.least:
            what = "it has an older generation than it was asked for"
        elif msg.piece_bytes and not min(info.piece_bytes, MIN_PIECE) <= msg.piece_bytes <= info.piece_bytes:
            what = "it sends pieces of another size than was agreed on"
        elif msg.bands is not None and not msg.bands[0] < msg.bands[1] <= bands:
            what = "it names bands of layers that do not exist"
        elif msg.final and self.end is not None:
            what = "it announces a second last part"
        elif msg.final and not (fetch.enough or fetch.tokens) <= msg.hi <= fetch.tokens:
            what = f"its last part ends at token {msg.hi}, where {fetch.tokens} tokens are wanted"
        elif not msg.final and hi <= lo:
            what = "it announces a part of which nothing is wanted"
        elif self.spans and self.told_tokens >= wanted and self._repeats(msg, fetch, bands, wanted):
            what = "it announces tokens twice"
        else:
            return None
        return Failure(FailureKind.MISUSE, what, link_name(self.spec.link))

    def _repeats(self, msg: m.PartReady, fetch: Fetch, bands: int, wanted: int) -> bool:
        """Return whether some tokens have been announced twice, now that as many have been as are wanted."""
        spans = [*self.spans.values(), Span(msg.lo, msg.hi, msg.bands)]
        return self.told_tokens > wanted or reached(spans, fetch.start, bands) < fetch.tokens

    def announced(self, msg: m.PartReady, info: LinkInfo) -> None:
        """Record that a part of the attempt has been announced."""
        self.generation, self.revocations = msg.generation, msg.revocations
        self.end = msg.hi if msg.final else self.end
        self.payload = self.payload or msg.payload
        self.spans[msg.part], self.bands = Span(msg.lo, msg.hi, msg.bands), info.planner.bands

    def take(self, msg: m.PartReady, info: LinkInfo, plan: CopyPlan) -> list[Action]:
        """Return the actions by which an announced part arrives; none if it has arrived."""
        ref = PartRef("consumer", self.spec.link, msg.transfer, self.attempt, msg.part)
        self.announced_bytes += plan.nbytes
        hashed = to_hash(plan, info, ref)
        if info.mode == "write" and not msg.piece_bytes:
            if hashed is None:
                return []
            self.flight[ref] = None
            return [Hash(ref, hashed, "destination")]
        self.flight[ref] = None
        if hashed is not None:
            self.to_hash[ref] = hashed
        return [Move(ref, VERBS[info.mode], plan, msg.stream, msg.piece_bytes, hashed)]

    def came(self, done: Moved) -> CopyPlan | None:
        """Record that a part has arrived or failed; return what is still to be hashed of it."""
        plan = self.to_hash.pop(done.ref, None)
        if done.failure is not None:
            return None
        if self.coming:
            self.coming.pop(done.ref, None)
        self.came_bytes += done.nbytes
        self.checksum += done.checksum or 0
        return plan if done.checksum is None and self.state is RankFetchState.MOVING else None

    def underway(self, msg: m.Underway) -> bool:
        """Record how much the producer says that it has written; return whether that is more than before."""
        moved, self.told_bytes = min(msg.moved, msg.nbytes), max(msg.nbytes, self.told_bytes)
        more, self.told_moved = moved > self.told_moved, max(moved, self.told_moved)
        return more

    @property
    def so_far(self) -> int:
        """The bytes of the attempt that have come, of those parts too that are on their way."""
        return max(self.came_bytes + sum(self.coming.values()), self.told_moved)

    def lost(self, why: Failure) -> Failure:
        """Return why the fetch fails with its link: of a peer that was there, that it is lost, and not only out of reach."""
        if self.broke is None or why.kind is not FailureKind.PEER_UNREACHABLE:
            return why
        return Failure(FailureKind.PEER_LOST, f"{self.broke.detail}, and then {why.detail}", why.peer)

    def __str__(self) -> str:
        return f"{self.state}, because its link broke: {self.broke.detail}" if self.broke else str(self.state)

    @property
    def quiet(self) -> bool:
        return not self.flight and not self.remote_writes

    @property
    def aborts(self) -> list[Action]:
        """The actions that abort its parts that may still touch memory."""
        return [Abort(ref) for ref in in_order(self.flight)]

    @property
    def written(self) -> list[Action]:
        """The actions that end the parts that its producer may have been writing, now that it has said that it has stopped."""
        return [RemoteWritesEnded(ref) for ref in in_order(self.flight)] if self.remote_writes else []

    def complete(self, start: int, enough: int) -> bool:
        """Return whether all parts are here, and cover everything that was offered and at least ``enough`` tokens."""
        if self.end is None or self.flight or self.error is not None:
            return False
        end = max(self.end, enough)
        return self.told_tokens >= (end - start) * self.bands and reached(self.spans.values(), start, self.bands) >= end

    def held(self, info: LinkInfo | None) -> bool:
        """Return whether the revocation counter and the checksum show that the bytes are good, so that nobody has to be asked."""
        if info is None or info.revocations is None or self.remote_writes:
            return False
        same = info.integrity == "off" or self.sum == m.pack_checksum(self.checksum)
        return same and info.revocations() == self.revocations


class FetchRecord(msgspec.Struct, eq=False, gc=False):
    """What a consumer keeps of a fetch."""

    spec: Fetch
    began: float
    deadline: float
    heard: float  # when the last part was announced
    asked: float = 0.0  # when a rank was last asked
    announced: float = 0.0  # when the first part was announced
    arrived_at: float = 0.0  # when everything had arrived from all ranks
    last: float = 0.0  # when bytes had last come
    gap: float = 0.0  # the longest time between two times at which bytes came, while something was on its way
    moving_since: float | None = None  # since when something has been on its way, or being checked; None: nothing is
    moved: float = 0.0  # the seconds before that in which something was
    begun: bool = False  # a part has been announced; the deadline was for that before, and is now for the outcome
    ranks: dict[LinkId, RankFetch] | None = None  # None: the route is not known yet
    rank_fetches: tuple[RankFetch, ...] = ()  # the same without their links; none while the route is not known
    outcome: Outcome | None = None
    nbytes: int = 0
    generation: Generation | None = None  # the newest that any rank has heard of
    round: int = 0  # how often all ranks have arrived

    def take(self, route: Iterable[RankRoute]) -> None:
        """Record the route, now that it is known."""
        self.rank_fetches = tuple([RankFetch(rank) for rank in route])
        self.ranks = {rank.spec.link: rank for rank in self.rank_fetches}

    @property
    def least(self) -> Generation:
        """The oldest generation that is of use: ranks that still have an older one will give it up."""
        return FIRST if self.generation is None else self.generation

    def came(self, now: float) -> None:
        """Record that bytes have come."""
        if self.moving_since is not None:
            self.gap = max(self.gap, now - max(self.last, self.moving_since))
        self.last = now

    def part_over(self, now: float) -> None:
        """Record that a part has ended while more are to come; stop the time of moving if nothing else is on its way."""
        if self.moving_since is not None and not any(rank.flight for rank in self.rank_fetches):
            self.moved += now - self.moving_since
            self.moving_since = None

    def stages(self, now: float) -> Stages:
        """Return when it reached each stage, if it ends now."""
        moving = self.moved if self.moving_since is None else self.moved + now - self.moving_since
        whole = self.outcome is None or self.outcome.failure is None
        came, announced = (self.nbytes, self.nbytes) if whole else self._bytes()
        waits = self.began, self.asked, self.announced, self.heard, self.arrived_at
        return Stages(*waits, now, moving, self.last, came, announced)

    def _bytes(self) -> tuple[int, int]:
        """Return how many bytes have come, of those parts too that are on their way, and how many were announced."""
        came = announced = 0
        for rank in self.rank_fetches:
            came += rank.so_far
            announced += max(rank.announced_bytes, rank.told_bytes)
        return came, announced

    def explain(self, why: Failure, now: float, hangs: HeldUp | None) -> Failure:
        """Return why it fails now, with how far it has got; ``hangs``: what all parts wait for, if this side moves nothing."""
        came, announced = self._bytes()
        if not announced:
            return why
        more, still = any(rank.end is None for rank in self.rank_fetches), now - (self.last or self.announced)
        within = any(rank.told_moved or rank.coming.keys() & rank.flight for rank in self.rank_fetches)
        held_up = hangs or next((rank.held_up for rank in self.rank_fetches if rank.held_up), None)
        return enriched(why, came, announced, more, self.stages(now).moving, still, self.gap, within, held_up)

    @property
    def enough(self) -> int:
        """The fewest tokens that each rank must have."""
        return self.spec.enough or self.spec.tokens

    @property
    def short(self) -> int | None:
        """The token up to which all ranks have it; ``None`` if that is all of it."""
        end = min([x.end for x in self.rank_fetches if x.end is not None], default=self.spec.tokens)
        return end if end < self.spec.tokens else None

    @property
    def payload(self) -> bytes:
        """The payload of the offer, from the first of the ranks that sent one."""
        sent = [rank for rank in self.rank_fetches if rank.payload]
        return min(sent, key=lambda rank: rank.spec.rank).payload if sent else b""

    def fetch_request(self, rank: RankFetch, now: float, moving: float) -> m.FetchRequest:
        """Make the message that asks for a rank fetch's share, which may take ``moving`` seconds from its first part on."""
        s, left = self.spec, max(self.deadline - now, 0.0)
        wanted = s.transfer, rank.attempt, s.digest, s.start, s.tokens, s.blocks
        how = rank.banded, s.tail
        return m.FetchRequest(*wanted, rank.spec.readers, left, rank.least, moving, s.offered, s.enough, *how)

    def commit_request(self, rank: RankFetch) -> m.CommitRequest:
        """Make the message that asks, once everything has arrived, whether it can be trusted."""
        assert rank.generation is not None  # the parts named it
        checksum, alone = m.pack_checksum(rank.checksum), len(self.rank_fetches) == 1
        return m.CommitRequest(self.spec.transfer, rank.attempt, rank.generation, checksum, self.round, alone)

    def committed(self, rank: RankFetch) -> m.Committed:
        """Make the message that tells a producer rank that the fetch is delivered."""
        return m.Committed(self.spec.transfer, rank.attempt, self.spec.digest, rank.spec.readers)

    def close_attempt(self, rank: RankFetch) -> m.CloseAttempt:
        """Make the message that tells a producer rank that an attempt is void."""
        s, again = self.spec, self.outcome is None
        why = NEWER if self.outcome is None or self.outcome.failure is None else self.outcome.failure
        return m.CloseAttempt(s.transfer, rank.attempt, s.digest, why.kind, why.detail, again, rank.spec.readers)

    def plan(self, msg: m.PartReady, info: LinkInfo) -> CopyPlan:
        """Return the plan of an announced part.

        Raises:
            PlanError: What was announced does not fit what is wanted.
        """
        s, planner = self.spec, info.planner
        blocks = placed(planner, msg.blocks, min(msg.lo, s.tokens), msg.final) if msg.lo else msg.blocks
        span = msg.lo, msg.hi, msg.final, msg.bands
        return plan_part(planner, blocks, s.blocks, s.start, s.tokens, *span, info.moves_tail(s.tail))

    def ended(self, now: float) -> Ended:
        """Make the event that tells the engine of the outcome."""
        assert self.outcome is not None
        s, delivered = self.spec, self.outcome.delivered
        payload, short = (self.payload, self.short) if delivered else (b"", None)
        seconds, stages = now - self.began, self.stages(now)
        more = self.generation, seconds - stages.moving if self.begun else 0.0, payload, stages, short
        nbytes = self.nbytes if delivered else self.nbytes + sum([x.so_far - x.came_bytes for x in self.rank_fetches])
        return Ended("consumer", s.transfer, s.handle, self.outcome, nbytes, seconds, *more)

    def overdue(self, start: float, timeout: float) -> Failure:
        """Return the failure if the deadline passes now: its patience or ``start`` for the first part, then ``timeout`` for the outcome."""
        states = ", ".join(sorted({str(rank) for rank in self.rank_fetches} or {f"looking for {self.spec.source}"}))
        why = f"nothing came within {self.spec.patience or start:g} s (still {states})"
        if self.begun:
            why = f"no outcome within {timeout:g} s of the first part (still {states})"
        peers = ", ".join(link_name(rank.spec.link) for rank in self.rank_fetches) or str(self.spec.source)
        advice = ""
        if self.late is FailureKind.NEVER_OFFERED and not self.spec.patience:
            advice = "check that the producer's engine ran this request; raise 'start_timeout' if requests queue there for longer"
        return Failure(self.late, why, peers, advice)

    @property
    def late(self) -> FailureKind:
        """The kind of failure if the deadline passes now, by what its ranks still wait for."""
        if not self.rank_fetches:
            return FailureKind.PEER_UNREACHABLE
        for rank in self.rank_fetches:
            if rank.state in (RankFetchState.LINKING, RankFetchState.PAUSED) and not rank.revoked:
                return FailureKind.PEER_LOST if rank.broke is not None else FailureKind.PEER_UNREACHABLE
        for rank in self.rank_fetches:
            if rank.told_bytes and rank.state is RankFetchState.REQUESTED:
                continue  # its first part is on its way
            if rank.state in (RankFetchState.REQUESTED, RankFetchState.LINKING, RankFetchState.PAUSED):
                return FailureKind.REVOKED if rank.revoked else FailureKind.NEVER_OFFERED
        return FailureKind.TIMED_OUT

    @property
    def quiet(self) -> bool:
        for rank in self.rank_fetches:
            if not rank.quiet:
                return False
        return True

    def all_are(self, state: RankFetchState) -> bool:
        for rank in self.rank_fetches:
            if rank.state is not state:
                return False
        return True
