"""Match an offer with what one consumer wants, and announce it in parts."""

from __future__ import annotations

from collections.abc import Mapping

from kvxfer.failures import Failure, FailureKind
from kvxfer.geometry import CopyPlan, PlanError
from kvxfer.protocol import messages as m
from kvxfer.protocol.offer_record import ConsumerLink, RankServe
from kvxfer.protocol.parts import Span, carried, lacking, piece_bytes, plan_part, to_hash
from kvxfer.protocol.transitions import ServeEvent
from kvxfer.protocol.values import Action, Hash, LinkInfo, Mode, Move, PartRef, Send
from kvxfer.transport import Verb
from kvxfer.values import Offer

VERBS: Mapping[Mode, Verb] = {"read": Verb.READ, "write": Verb.WRITE, "sendrecv": Verb.SEND}
"""The verb by which a part leaves this side, by the mode of its link."""


def unfit(offer: Offer, request: m.FetchRequest, info: LinkInfo) -> Failure | None:
    """Return why this offer can never be what the consumer wants, or ``None`` if it can be."""
    if offer.digest != request.digest:
        why = "the digests differ: it is not the KV of the consumer's prompt"
        return Failure(FailureKind.DIGEST_DIFFERS, why, info.name)
    if offer.final and offer.tokens < request.tokens and not _enough(offer, request, info):
        why = f"the producer holds {offer.tokens} tokens, the consumer wants {request.tokens}"
        return Failure(FailureKind.NEVER_OFFERED, why, info.name)
    if offer.final and offer.tokens != request.tokens and any(g.kind == "state" for g in info.planner.src.groups):
        why = f"its state is the one after {offer.tokens} tokens, the consumer wants that after {request.tokens}"
        return Failure(FailureKind.NEVER_OFFERED, why, info.name)
    return None


def _enough(offer: Offer, request: m.FetchRequest, info: LinkInfo) -> bool:
    """Return whether the consumer can use fewer tokens than it wants, which only caches of ``full`` groups can."""
    only_full = all(g.kind == "full" for cache in (info.planner.src, info.planner.dst) for g in cache.groups)
    return only_full and 0 < request.enough <= offer.tokens


def untold(serve: RankServe, info: LinkInfo) -> list[Span]:
    """Return what is ready of an offer and not yet announced to its consumer; at least an empty span if the offer is final."""
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


def plan_for(serve: RankServe, info: LinkInfo, offer: Offer, span: Span, final: bool) -> CopyPlan:
    """Return the plan of the part that holds this span.

    Raises:
        PlanError: The block tables do not join.
    """
    blocks, wanted = (offer.blocks, serve.request.blocks), (serve.request.start, serve.request.tokens)
    tail = info.moves_tail(serve.request.tail)
    return plan_part(info.planner, *blocks, *wanted, span.lo, span.hi, final, span.bands, tail)


def delivered_bytes(serve: RankServe, info: LinkInfo, offer: Offer) -> int:
    """Return how many bytes went to a consumer that has everything.

    For an unattended serve this has to be planned now, because the consumer was not kept waiting for a plan. If the block tables
    do not join, it has read nothing.
    """
    if not info.unattended:
        return serve.bytes
    planner, request, sent = info.planner, serve.request, min(serve.sent)
    try:
        if planner.all_full:
            tail = info.moves_tail(request.tail) and sent == request.tokens
            return planner.nbytes(offer.blocks, request.blocks, request.start, sent, tail)
        return plan_for(serve, info, offer, Span(request.start, sent), serve.final).nbytes
    except PlanError:
        return 0


def announce(
    serve: RankServe, link: ConsumerLink, offer: Offer, plan: CopyPlan | None, span: Span, final: bool
) -> list[Action]:
    """Return the actions that tell the consumer of the next part of an offer, move it and hash it; ``serve`` is updated.

    ``plan`` is that of the part; ``None`` if the serve is unattended. ``final``: whether it is the last part.
    """
    request, info, number = serve.request, link.info, serve.part
    serve.on(ServeEvent.ANNOUNCE)
    ready = m.PartReady(
        request.transfer,
        request.attempt,
        offer.generation,
        number,
        span.lo,
        span.hi,
        final,
        carried(info.planner, offer.blocks, span, final),
        link.stream,
        0 if plan is None else piece_bytes(plan, info),
        serve.revocations,
        serve.record.payload if final else b"",
        span.bands,
    )
    serve.part, serve.final, serve.generation = number + 1, final, offer.generation
    first, past = span.bands or (0, len(serve.sent))
    serve.sent = (*serve.sent[:first], *(span.hi,) * (past - first), *serve.sent[past:])
    link.stream += 1
    if plan is None:
        return [Send(serve.link, ready)]
    serve.bytes += plan.nbytes
    ref = PartRef("producer", serve.link, request.transfer, request.attempt, number)
    out: list[Action] = []
    hashed = to_hash(plan, info, ref)
    if hashed is not None:
        serve.hashing[ref] = None
        out.append(Hash(ref, hashed, "source", info.owner))
    if info.mode == "write" and not ready.piece_bytes:
        serve.flight[ref] = None
        serve.unsent[ref] = ready
        return [Move(ref, Verb.WRITE, plan, ready.stream, ready.piece_bytes), *out]
    if info.mode == "read" and not ready.piece_bytes:
        return [Send(serve.link, ready), *out]
    serve.flight[ref] = None  # a staged read or write needs this side to pack
    return [Send(serve.link, ready), Move(ref, VERBS[info.mode], plan, ready.stream, ready.piece_bytes), *out]
