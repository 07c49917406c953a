"""What the producer's machine keeps of a transfer: plain records, and the few questions that need nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm

import msgspec
from msgspec import field

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import CopyPlan, PlanError
from kvxfer.identity import Generation, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.budgets import Keep
from kvxfer.protocol.pace import LinkPace
from kvxfer.protocol.parts import Span, lacking, piece_bytes, plan_part, to_hash
from kvxfer.protocol.transitions import RANK_SERVE, ServeEvent, ServeState
from kvxfer.protocol.values import Abort, Action, Hash, LinkId, LinkInfo, Mode, Move, PartRef, Send, in_order
from kvxfer.transport import Verb
from kvxfer.values import MOST_BANDS, Offer

__all__ = [
    "Early",
    "OfferRecord",
    "Key",
    "ConsumerLink",
    "Over",
    "RankServe",
    "announce",
    "delivered_bytes",
    "follows",
    "plan_for",
    "told",
    "unfit",
    "unsent",
]

ALL = MOST_BANDS + 1
"""More bands than there are: all layers."""

VERBS: Mapping[Mode, Verb] = {"read": Verb.READ, "write": Verb.WRITE, "sendrecv": Verb.SEND}
"""How a part leaves here, by the mode of its link."""

Key = tuple[LinkId, int]
"""A serve: the link and the consumer's attempt."""


class ConsumerLink(msgspec.Struct, eq=False):
    """A consumer rank that has said hello.

    Attributes:
        info: what is known of its link.
        serves: what it is being served, by attempt, the newest last.
        stream: the next number of a part on the link.
        pace: how fast we have written over it.
    """

    info: LinkInfo
    serves: dict[int, RankServe] = field(default_factory=dict)
    stream: int = 0
    pace: LinkPace = field(default_factory=LinkPace)

    def banded(self, request: m.FetchRequest) -> bool:
        """Return whether bands of layers pay for what is wanted: the side that moves the parts knows how fast the link is."""
        if self.info.mode != "write":
            return request.banded
        return self.pace.slow((request.tokens - request.start) * self.info.planner.token_bytes)


class RankServe(msgspec.Struct, eq=False):
    """One attempt of one consumer rank, on the producer's side."""

    record: OfferRecord
    link: LinkId
    key: Key
    request: m.FetchRequest
    reader: int  # the consumer's agent, by its epoch
    expires: float
    lent: bool  # it wanted more time than it got, and may ask anew
    sent: list[int]  # tokens announced so far, of each band of layers
    banded: bool = False  # it gets bands as they are ready
    state: ServeState = ServeState.WAITING
    part: int = 0
    bytes: int = 0  # of the parts announced, where they were planned
    final: bool = False
    generation: Generation | None = None
    revocations: int | None = None  # when its first part was announced, if that was vouched for
    again: bool = False  # what AttemptClosed will say of a later generation
    why: Failure | None = None  # what AttemptClosed will say
    unsent: dict[PartRef, m.PartReady] = field(default_factory=dict)  # write: told when the bytes are there
    flight: set[PartRef] = field(default_factory=set)  # own parts that may still touch memory
    hashing: set[PartRef] = field(default_factory=set)  # parts that are still being hashed
    checksum: int = 0  # of those that have been; checksums add up
    commit: m.CommitRequest | None = None  # waits for the last of them

    def on(self, stimulus: ServeEvent) -> bool:
        """Take a transition, and return false when the stimulus means nothing in this state."""
        after = RANK_SERVE.after(self.state, stimulus)
        if after is None:
            return False
        self.state = after
        return True

    @property
    def nbytes(self) -> int:
        """Size of its block table on the wire, in bytes."""
        return self.request.blocks.nbytes

    @property
    def quiet(self) -> bool:
        return not self.flight and not self.hashing

    @property
    def aborts(self) -> list[Action]:
        """The actions that end whatever of it still touches memory."""
        return [Abort(ref) for ref in in_order(self.flight | self.hashing)]

    @property
    def live(self) -> bool:
        return self.state in (ServeState.WAITING, ServeState.SERVING)


class OfferRecord(msgspec.Struct, eq=False):
    """What a producer rank keeps of an offer and of those who ask for it."""

    transfer: TransferId
    began: float
    leased: float  # until when the offer is kept though nobody asks
    offer: Offer | None = None  # the last one
    tokens: int = 0  # complete in all layers, of its generation
    generation: Generation | None = None  # the last one that was offered or revoked
    least: Generation = 0  # older ones are given up
    revoked: Generation | None = None  # the last one that was given up while the transfer goes on, until it is released
    serves: dict[Key, RankServe] = field(default_factory=dict)
    # Readers, by their agents' epochs. They count once their digest is that of the offer: whoever names another is at the
    # wrong door, and changes nothing for those who are not.
    digest: bytes | None = None  # of the last offer
    consumers: int = 1  # how many engines it is for
    payload: bytes = b""  # of this generation
    handle: str = ""  # what the engine calls it
    fit: dict[int, int] = field(default_factory=dict)  # those that count, and how many their engine has by their word
    settled: set[int] = field(default_factory=set)
    dropped: set[int] = field(default_factory=set)
    misfits: set[int] = field(default_factory=set)  # want more than there is; their word does not count
    nbytes: int = 0
    outcome: Outcome | None = None
    known: bool = False  # the engine has spoken of it and waits for its end
    short: Failure | None = None  # why it was given up, where those being served may finish with what there is

    def take(self, offer: Offer) -> None:
        """Take what the engine offers."""
        if offer.generation != self.generation:
            self.payload, self.short, self.tokens = b"", None, 0
        self.payload = offer.payload or self.payload
        self.known, self.generation, self.offer, self.consumers = True, offer.generation, offer, offer.consumers
        self.handle = offer.handle
        if not offer.bands:
            self.tokens = offer.tokens
        if self.digest != offer.digest:
            self.digest = offer.digest
            for readers in (self.fit, self.settled, self.dropped, self.misfits):
                readers.clear()

    @property
    def name(self) -> str:
        """What its events are told under: what the engine calls it, or the transfer's name."""
        return self.handle or str(self.transfer)

    def give_up(self, generation: Generation) -> None:
        """Give up what is of this generation or older."""
        self.least = max(self.least, generation + 1)
        self.generation = max(generation, self.next_generation - 1)

    def serves_of(self, generation: Generation) -> bool:
        """Return whether something that was announced of this generation or of older ones may still move."""
        return any(s.generation is not None and s.generation <= generation for s in self.serves.values())

    @property
    def next_generation(self) -> Generation:
        """The generation after the last one that the engine has spoken of."""
        return 0 if self.generation is None else self.generation + 1

    def admit(self, reader: int, readers: int) -> None:
        """Count a consumer that wants what is offered.

        Args:
            reader: the consumer's agent, by its epoch.
            readers: how many readers its engine has by its word.
        """
        self.fit[reader] = max(readers, self.fit.get(reader, 1))

    def leave(self, reader: int) -> None:
        """Forget a consumer that is lost and what it said, unless it is done or is served over another link."""
        if reader not in self.settled | self.dropped and not self.lives(reader):
            self.fit.pop(reader, None)

    def reject(self, reader: int, digest: bytes) -> None:
        """Count a consumer out that wants what is not to be had here."""
        self.fit.pop(reader, None)
        if digest == self.digest:
            self.misfits.add(reader)

    def drop(self, reader: int) -> None:
        """Note that a reader that counts has given the transfer up."""
        self.dropped.add(reader)

    @property
    def served(self) -> bool:
        """Whether it is being served to anybody."""
        return any(serve.live for serve in self.serves.values())

    def lives(self, reader: int, but: RankServe | None = None) -> bool:
        """Return whether the transfer is being served to this reader by an attempt other than ``but``."""
        return any(s.live and s.reader == reader and s is not but for s in self.serves.values())

    @property
    def whole(self) -> bool:
        """Whether as many engines have it all as it is for."""
        return self._enough(self.settled)

    @property
    def done(self) -> bool:
        """Whether as many engines as it is for have it all or have dropped it, and no other reader is being served."""
        over = self.settled | self.dropped
        return self._enough(over) and all(s.reader in over or not s.live for s in self.serves.values())

    def _enough(self, readers: Iterable[int]) -> bool:
        """Return whether these readers make up as many engines as it is for; each is a share of an engine of so many."""
        sizes = [self.fit.get(r, 1) for r in readers]
        unit = lcm(*sizes)  # shares in whole numbers, for they must add up exactly
        return sum([unit // size for size in sizes]) >= self.consumers * unit


class Over(msgspec.Struct, frozen=True):
    """What is remembered of an offer record that has ended."""

    outcome: Outcome
    least: Generation  # the engine has been told the end of older ones


class Early(Keep[int, TransferId, tuple[bytes, int]]):
    """Who has given a transfer up before it was offered, by reader and transfer: its digest, and how many its engine has."""

    def take(self, transfer: TransferId, digest: bytes) -> dict[int, int]:
        """Return who gave the transfer up under this digest, and how many readers their engines have.

        All that is known of the transfer is forgotten.
        """
        fit = {}
        for r in sorted(self.owners(transfer)):
            known, readers = self.get(r, transfer) or (b"", 0)
            if readers and known == digest:
                fit[r] = readers
            self.pop(r, transfer)
        return fit


def follows(new: Offer, old: Offer) -> bool:
    """Return whether a new offer says more than the old one."""
    if new.generation != old.generation:
        return new.generation > old.generation
    there, before = (new.tokens, new.bands or ALL), (old.tokens, old.bands or ALL)
    if (there, new.final) == (before, old.final):
        return new.consumers < old.consumers
    return not old.final and (new.final or there > before)


def unsent(serve: RankServe, info: LinkInfo) -> list[Span]:
    """Return what there is of an offer that its consumer wants and has not been told of; with the final offer at least something."""
    h, request, step = serve.record, serve.request, info.planner.indivisible
    offer = h.offer
    assert offer is not None
    tokens = min(request.tokens, h.tokens if offer.final else h.tokens - h.tokens % step)
    if not serve.banded:
        lo, hi = serve.sent[0], max(tokens, serve.sent[0])
        return [Span(lo, hi)] if hi > lo or offer.final else []
    ahead = min(request.tokens, offer.tokens - offer.tokens % step)
    ready = [max(ahead if band < offer.bands else tokens, sent) for band, sent in enumerate(serve.sent)]
    spans = lacking(serve.sent, ready)
    end = max(tokens, min(serve.sent))
    return spans or ([Span(end, end)] if offer.final else [])


def unfit(offer: Offer, request: m.FetchRequest, info: LinkInfo) -> Failure | None:
    """Return why this offer can never be what the consumer wants, or ``None`` if it can be."""
    if offer.digest != request.digest:
        why = "the digests differ: it is not the KV of the consumer's prompt"
        return Failure(FailureKind.DIGEST_DIFFERS, why, info.name)
    if offer.final and offer.tokens < request.tokens and not _enough(offer, request, info):
        why = f"the producer holds {offer.tokens} tokens, the consumer wants {request.tokens}"
        return Failure(FailureKind.NEVER_OFFERED, why, info.name)
    if offer.final and offer.tokens != request.tokens and any(g.kind == "state" for g in info.planner.src.groups):
        why = f"its state is that after token {offer.tokens}, the consumer wants {request.tokens}"
        return Failure(FailureKind.NEVER_OFFERED, why, info.name)
    return None


def _enough(offer: Offer, request: m.FetchRequest, info: LinkInfo) -> bool:
    """Return whether fewer tokens than are wanted are of use to the consumer: what else it keeps is of all of them."""
    only_full = all(g.kind == "full" for cache in (info.planner.src, info.planner.dst) for g in cache.groups)
    return only_full and 0 < request.enough <= offer.tokens


def plan_for(serve: RankServe, info: LinkInfo, offer: Offer, span: Span, final: bool) -> CopyPlan:
    """Return the plan of the part that holds this.

    Raises:
        PlanError: the block tables do not join.
    """
    request = serve.request
    return plan_part(
        info.planner, offer.blocks, request.blocks, request.start, request.tokens, span.lo, span.hi, final, span.bands
    )


def delivered_bytes(serve: RankServe, info: LinkInfo, offer: Offer) -> int:
    """Return how many bytes a consumer has got that has everything.

    Over an unattended link nobody has planned it here before, because the consumer would have had to wait for that. Of block
    tables that do not join it has read nothing.
    """
    if not info.unattended:
        return serve.bytes
    try:
        return plan_for(serve, info, offer, Span(serve.request.start, min(serve.sent)), serve.final).nbytes
    except PlanError:
        return 0


def announce(
    serve: RankServe, link: ConsumerLink, offer: Offer, plan: CopyPlan | None, span: Span, final: bool
) -> list[Action]:
    """Return the actions that tell the consumer of the next part, move it and hash it.

    Args:
        serve: the attempt; it is brought up to date.
        link: the consumer's.
        offer: what is announced.
        plan: that of the part; ``None`` where the link is unattended.
        span: what the part holds.
        final: whether it is the last part.
    """
    request, info, number = serve.request, link.info, serve.part
    serve.on(ServeEvent.ANNOUNCE)
    ref = PartRef("producer", serve.link, request.transfer, request.attempt, number)
    ready = m.PartReady(
        request.transfer,
        request.attempt,
        offer.generation,
        number,
        span.lo,
        span.hi,
        final,
        offer.blocks,
        link.stream,
        0 if plan is None else piece_bytes(plan, info),
        serve.revocations,
        serve.record.payload if final else b"",
        span.bands,
    )
    serve.part, serve.final, serve.generation = number + 1, final, offer.generation
    first, past = span.bands or (0, len(serve.sent))
    serve.sent[first:past] = [span.hi] * (past - first)
    link.stream += 1
    if plan is None:
        return [Send(serve.link, ready)]
    serve.bytes += plan.nbytes
    out: list[Action] = []
    hashed = to_hash(plan, info, ref)
    if hashed is not None:
        serve.hashing.add(ref)
        out.append(Hash(ref, hashed, "source"))
    if info.mode == "write" and not ready.piece_bytes:
        serve.flight.add(ref)
        serve.unsent[ref] = ready
        return [Move(ref, Verb.WRITE, plan, ready.stream, ready.piece_bytes), *out]
    if info.mode == "read" and not ready.piece_bytes:
        return [Send(serve.link, ready), *out]
    serve.flight.add(ref)  # what is read or written staged needs us to pack
    return [Send(serve.link, ready), Move(ref, VERBS[info.mode], plan, ready.stream, ready.piece_bytes), *out]


def told(outcome: Outcome) -> Failure:
    """Return what those who still want a transfer are told of its end."""
    if outcome.failure is None:
        return Failure(FailureKind.WITHDRAWN, "all its readers have fetched it")
    kept = (FailureKind.TIMED_OUT, FailureKind.BACKEND_FAILED)
    kind = outcome.failure.kind
    return Failure(kind if kind in kept else FailureKind.WITHDRAWN, outcome.failure.detail)
