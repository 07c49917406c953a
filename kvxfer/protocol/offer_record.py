"""What the producer's machine keeps of a transfer: plain records."""

from __future__ import annotations

import msgspec
from msgspec import field

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import FIRST, Generation, Handle, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.pace import LinkPace
from kvxfer.protocol.parts import AHEAD, Span
from kvxfer.protocol.readers import OVER, Readers
from kvxfer.protocol.shares import IndexedExpiringMap
from kvxfer.protocol.transitions import RANK_SERVE, ReaderEvent, ServeEvent, ServeState
from kvxfer.protocol.values import (
    Abort,
    Action,
    Emit,
    Ended,
    GenerationReleased,
    LinkId,
    LinkInfo,
    Moved,
    PartRef,
    Released,
    in_order,
)
from kvxfer.transitions import Life
from kvxfer.values import MAX_BANDS, Offer

ALL = MAX_BANDS + 1
"""More bands than there are: all layers."""

MAX_KEPT_REASON = 200
"""The most characters that are remembered of what a consumer gives as its reason, or is given."""

Key = tuple[LinkId, int]
"""The name of a serve: the link and the consumer's attempt."""


class ConsumerLink(msgspec.Struct, eq=False):
    """A consumer rank that has said hello."""

    info: LinkInfo
    serves: dict[int, RankServe] = field(default_factory=dict)  # what it is being served, by attempt, the newest last
    stream: int = 0  # the next number of a part on the link
    pace: LinkPace = field(default_factory=LinkPace)  # how fast this side has written over it

    def banded(self, request: m.FetchRequest) -> bool:
        """Return whether bands of layers pay off for a request; the side that moves the parts knows how fast the link is."""
        if self.info.mode != "write":
            return request.banded
        return self.pace.slow((request.tokens - request.start) * self.info.planner.token_bytes)

    def wrote(self, done: Moved, now: float) -> None:
        """Record that this side has moved a part, which tells how fast it writes over the link."""
        self.pace.took(done.nbytes, done.seconds, now)


class RankServe(msgspec.Struct, Life[ServeState, ServeEvent], eq=False):
    """One attempt of one consumer rank, on the producer's side.

    Thousands may wait, so it holds nothing that the garbage collector has to visit: no list and no set.
    """

    table = RANK_SERVE

    record: OfferRecord
    link: LinkId
    key: Key
    request: m.FetchRequest
    reader: int  # the consumer's agent, by its epoch
    expires: float
    lent: bool  # it got less time than it asked for, and may ask again
    sent: tuple[int, ...]  # tokens announced so far, of each band of layers
    banded: bool = False  # it gets each band as it is ready
    cut: tuple[Span, ...] = ()  # parts that wait for those in flight to end
    state: ServeState = ServeState.WAITING
    part: int = 0
    bytes: int = 0  # of the announced parts that were planned here
    moved: int = 0  # of those that this side has moved
    moving: dict[PartRef, int] = field(default_factory=dict)  # of parts that take long: the bytes that have gone
    final: bool = False
    generation: Generation | None = None
    revocations: int | None = None  # the count when its first part was announced, if there was one
    again: bool = False  # whether AttemptClosed will say that a later generation may come
    why: Failure | None = None  # what AttemptClosed will say
    unsent: dict[PartRef, m.PartReady] = field(default_factory=dict)  # write mode: sent once the bytes are there
    flight: dict[PartRef, None] = field(default_factory=dict)  # own parts that may still touch memory
    hashing: dict[PartRef, None] = field(default_factory=dict)  # parts that are still being hashed
    checksum: int = 0  # of those that have been; checksums add up
    commit: m.CommitRequest | None = None  # waits for the last of them

    @property
    def quiet(self) -> bool:
        return not self.flight and not self.hashing

    @property
    def aborts(self) -> list[Action]:
        """The actions that abort its parts that may still touch memory."""
        return [Abort(ref) for ref in in_order(self.flight | self.hashing)]

    def parts_left(self, info: LinkInfo) -> int:
        """Return how many more parts may be announced before one in flight has ended."""
        return AHEAD - len(self.flight) if info.mode == "sendrecv" else m.MAX_PARTS

    def begins_with_cut(self, span: Span) -> bool:
        """Return whether a span begins with the parts that wait; what it has beyond them is cut after them."""
        first, last = self.cut[0], self.cut[-1]
        return (first.lo, first.bands) == (span.lo, span.bands) and last.hi <= span.hi

    def underway(self) -> m.Underway:
        """Make the message that tells the consumer how far this side has got."""
        moved = self.moved + sum(self.moving.values())
        return m.Underway(self.request.transfer, self.request.attempt, moved, self.bytes)

    def checksums(self) -> m.Checksums:
        """Make the message that tells the consumer the checksum of what it should have got."""
        return m.Checksums(self.request.transfer, self.request.attempt, m.pack_checksum(self.checksum))

    def overdue(self, now: float) -> tuple[Failure, bool]:
        """Return why it ends, now that its time is over, and whether its consumer may ask again."""
        if now < self.expires:
            why = "the consumer says that it was offered, but it is not known here any more"
            return Failure(FailureKind.WITHDRAWN, why), False
        waited = self.state is ServeState.WAITING
        kind = FailureKind.NEVER_OFFERED if waited else FailureKind.TIMED_OUT
        announced = f"{min(self.sent, default=0)} of {self.request.tokens} tokens announced"
        why = f"the consumer's time for it is over, with {announced}"
        if self.lent and not waited:
            why = f"it took longer than both 'lease' and 'transfer_timeout' of this producer, with {announced}"
        return Failure(kind, why), self.lent and waited

    def not_served(self, why: Failure) -> None:
        """Record why its consumer does not get the offer by it, if that knows the digest or has another."""
        if why.kind is FailureKind.DIGEST_DIFFERS or self.request.digest == self.record.digest:
            self.record.unserved = why

    @property
    def live(self) -> bool:
        return self.state in (ServeState.WAITING, ServeState.SERVING)


class OfferRecord(msgspec.Struct, eq=False):
    """What a producer rank keeps of an offer and of its readers."""

    transfer: TransferId
    began: float
    leased: float  # until when the offer is kept if nobody asks
    offer: Offer | None = None  # the last one
    tokens: int = 0  # how many are complete in all layers, in its generation
    generation: Generation | None = None  # the last one that was offered or revoked
    least: Generation = FIRST  # older ones are given up
    revoked: Generation | None = None  # the last one given up without ending the transfer, until it is released
    serves: dict[Key, RankServe] = field(default_factory=dict)
    before: OfferRecord | None = None  # the transfer's previous record, until that is released
    follower: OfferRecord | None = None  # the record that waits for the release of this one
    digest: bytes | None = None  # of the last offer
    consumers: int = 1  # how many engines it is for
    payload: bytes = b""  # of this generation
    handle: Handle = Handle("")  # the engine's name for it, or the transfer's; empty before it is offered
    readers: Readers = field(default_factory=Readers)
    nbytes: int = 0
    outcome: Outcome | None = None
    known: bool = False  # the engine has offered or revoked it, and waits for its end
    short: Failure | None = None  # why it was given up, if those being served may finish with what there is
    claimed: bool = False  # whether a consumer has ever asked for it, or said that it waits
    unserved: Failure | None = None  # why the last consumer that asked for it did not get it

    def take(self, offer: Offer) -> None:
        if offer.generation != self.generation:
            self.payload, self.short, self.tokens = b"", None, 0
        self.payload = offer.payload or self.payload
        self.known, self.generation, self.offer, self.consumers = True, offer.generation, offer, offer.consumers
        self.handle = offer.handle or Handle(str(offer.transfer))
        if not offer.bands:
            self.tokens = offer.tokens
        if self.digest != offer.digest:
            if self.digest is not None:
                self.readers.clear()
            self.digest = offer.digest

    @property
    def name(self) -> Handle:
        """The handle in its events."""
        return self.handle or Handle(str(self.transfer))

    def give_up(self, generation: Generation) -> None:
        """Give up this generation and older ones."""
        self.least = max(self.least, Generation(generation + 1))
        self.generation = generation if self.generation is None else max(generation, self.generation)

    def serves_of(self, generation: Generation) -> bool:
        """Return whether something of this generation or of older ones may still move."""
        return any(s.generation is not None and s.generation <= generation for s in self.serves.values())

    @property
    def next_generation(self) -> Generation:
        """The generation after the last one that the engine has offered or revoked."""
        return FIRST if self.generation is None else Generation(self.generation + 1)

    def heard(self, reader: int, event: ReaderEvent, siblings: int = 1) -> bool:
        """Record what a consumer wants, or no longer wants; return False if that changes nothing."""
        self.claimed = True
        return self.readers.on(reader, event, siblings)

    def unfetched(self, lease: float) -> Failure:
        """Return why it ends if its lease, in seconds, has run out."""
        whose = f", by all {self.consumers} engines that it is for" if self.consumers > 1 else ""
        why = f"it was not fetched within the lease of {lease:g} s{whose}"
        if (last := self.unserved) is not None:
            advice = "" if last.kind is FailureKind.CANCELLED else last.advice
            return Failure(
                FailureKind.UNFETCHED, f"{why}; one asked for it and did not get it: {last.detail}", last.peer, advice
            )
        if self.claimed:
            return Failure(FailureKind.UNFETCHED, why)
        advice = "check that the router passes the params of this engine's answer on to an engine that loads"
        return Failure(FailureKind.UNFETCHED, f"{why}, and no engine has asked for it", advice=advice)

    def ended(self, outcome: Outcome, now: float) -> Ended:
        """Make the event that tells the engine of the outcome."""
        seconds = now - self.began
        unclaimed = not self.claimed and outcome.kind is FailureKind.UNFETCHED
        what = self.transfer, self.name, outcome, self.nbytes, seconds, self.generation
        return Ended("producer", *what, unclaimed=unclaimed)

    def released(self) -> list[Action]:
        """Return the release of the engine's blocks, if nothing of the offer moves any more; it comes once."""
        if self.outcome is None or self.serves or not self.known:
            return []
        return [Emit(Released("producer", self.transfer, self.name, self.generation))]

    def released_generation(self) -> list[Action]:
        """Return the release of a revoked generation of a transfer that goes on, if nothing of it moves any more."""
        if self.revoked is None or self.outcome is not None or self.serves_of(self.revoked):
            return []
        generation, self.revoked = self.revoked, None
        return [Emit(GenerationReleased("producer", self.transfer, self.name, generation))]

    @property
    def served(self) -> bool:
        """Whether it is being served to anybody."""
        return any(serve.live for serve in self.serves.values())

    def lives(self, reader: int, but: RankServe | None = None) -> bool:
        """Return whether the transfer is being served to this reader by an attempt other than ``but``."""
        return any(s.live and s.reader == reader and s is not but for s in self.serves.values())

    @property
    def done(self) -> bool:
        """Whether as many engines as it is for have everything or have dropped it, and no other reader is being served."""
        if not self.readers.enough(self.consumers):
            return False
        for serve in self.serves.values():
            if serve.live and self.readers.state(serve.reader) not in OVER:
                return False
        return True


class Over(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of an offer record that has ended."""

    outcome: Outcome
    least: Generation  # older ones have ended, as the engine has been told


class GivenUp(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a reader that has given up a transfer before it was offered."""

    digest: bytes
    readers: int  # how many its engine has
    kind: FailureKind
    reason: str

    @classmethod
    def of(cls, said: m.CloseAttempt) -> GivenUp:
        return cls(said.digest, max(said.readers, 1), said.kind, said.reason[:MAX_KEPT_REASON])

    @property
    def failure(self) -> Failure:
        """Why the offer ends."""
        late = self.kind in (FailureKind.NEVER_OFFERED, FailureKind.TIMED_OUT)
        advice = (
            "requests queue here for longer than the consumer waits: raise its 'start_timeout', or add prefill engines"
        )
        why = f"its consumer gave it up before it was offered: {self.reason}"
        return Failure(self.kind, why, advice=advice if late else "")


class Early(IndexedExpiringMap[int, bytes, GivenUp]):
    """Who gave up a transfer before it was offered, by reader and transfer (``TransferId.brief``)."""

    def take(self, transfer: TransferId, digest: bytes) -> dict[int, GivenUp]:
        """Return who gave the transfer up under this digest.

        Everything known of the transfer is forgotten.
        """
        if not len(self):
            return {}
        given_up, brief = {}, transfer.brief
        for r in sorted(self.owners(brief)):
            known = self.get(r, brief)
            if known is not None and known.digest == digest:
                given_up[r] = known
            self.pop(r, brief)
        return given_up


def follows(new: Offer, old: Offer) -> bool:
    """Return whether a new offer adds something to the old one."""
    if new.generation != old.generation:
        return new.generation > old.generation
    there, before = (new.tokens, new.bands or ALL), (old.tokens, old.bands or ALL)
    if (there, new.final) == (before, old.final):
        return new.consumers < old.consumers
    return not old.final and (new.final or there > before)


def told(outcome: Outcome) -> Failure:
    """Return what consumers that still want a transfer are told of its end."""
    if outcome.failure is None:
        return Failure(FailureKind.WITHDRAWN, "all its readers have fetched it")
    kept = (FailureKind.UNFETCHED, FailureKind.TIMED_OUT, FailureKind.BACKEND_FAILED)
    kind = outcome.failure.kind
    return Failure(kind if kind in kept else FailureKind.WITHDRAWN, outcome.failure.detail)
