"""The producer's half of the protocol as a sans-IO state machine: events in, actions out, the clock an argument.

An *offer record* is one transfer as this rank knows it: what the engine offered, and one *rank serve* for each attempt of a
consumer rank that wants it. The life of a rank serve is the table ``transitions.RANK_SERVE``. Fetch request and offer meet
here, whichever comes first. An offer is leased: it ends if nobody asks for it in time. A rank serve ends by the
consumer's own deadlines, for the first part and for the rest, or by the producer's if that is sooner. Only a consumer that
knows the digest of an offer can read it.
"""

from __future__ import annotations

from typing import assert_never

from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.identity import Generation, Handle, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.leased_offers import LeasedOffers
from kvxfer.protocol.offer_record import ConsumerLink, Early, GivenUp, OfferRecord, RankServe, follows
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.serves import MANY, MAX_WORDS
from kvxfer.protocol.transitions import ReaderEvent, ServeEvent, ServeState
from kvxfer.protocol.values import Action, Emit, GenerationReleased, Hashed, LinkId, LinkInfo, Moved, Moving, Send
from kvxfer.values import Offer

S, E, K = ServeState, ServeEvent, FailureKind


class ProducerMachine:
    """All offer records of one agent.

    Not thread-safe. Each method takes an event and returns the actions to be carried out. ``now`` is the time in seconds, always
    by the same clock.

    Args:
        lease: Seconds for which an offer is kept while nobody asks for it, and for which answers are remembered.
        longest: The most seconds for which a fetch request is kept, whatever it says.
        revocations: Counts what was announced and is given up; ``None`` means a counter of its own.
    """

    def __init__(self, lease: float, longest: float, revocations: RevocationCounter | None = None) -> None:
        self.corrupt = 0
        self._offers = LeasedOffers(lease, longest, revocations or RevocationCounter())
        self._records, self._over, self._serves = self._offers.records, self._offers.over, self._offers.serves
        self._links, self._stop = self._serves.links, self._serves.stop
        self._early = Early(lease, MAX_WORDS)

    # --- from the engine -------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float, called: float | None = None) -> list[Action]:
        """Offer blocks, or more of them, as the engine has at the time ``called``; ``None`` means now.

        An offer that does not continue or replace the last one is ignored: one of a generation that was revoked or whose end has
        been reported, or one that adds nothing.
        """
        over = self._over.get(offer.transfer)
        if over is not None and offer.generation < over.least:
            return []
        h = self._offers.record(offer.transfer, now if called is None else called)
        old = h.offer
        if offer.generation < h.least or (old is not None and not follows(offer, old)):
            return []
        if self._offers.closed is not None:
            h.known, h.generation = True, offer.generation
            return self._offers.end(h, self._offers.closed, now)
        out: list[Action] = []
        if old is not None and offer.generation > old.generation:
            out += self._offers.void(h, Failure(K.REVOKED, "the producer recomputed it"), again=True, now=now)
        h.take(offer)
        self._offers.lend(h, now)
        for serve in list(h.serves.values()):
            out += self._serves.advance(serve, now)
        for reader, known in self._early.take(offer.transfer, offer.digest).items():
            if h.outcome is None and not h.lives(reader):
                h.heard(reader, ReaderEvent.DROP, known.readers)
                out += self._offers.count(h, Outcome(known.failure), now)
        if old is not None and offer.consumers < old.consumers and h.outcome is None:
            out += self._offers.count(h, DELIVERED, now)
        return out

    def revoke(
        self, transfer: TransferId, generation: Generation, why: Failure, gone: bool, now: float, kept: bool = False
    ) -> list[Action]:
        """Give up the blocks of this generation and of older ones.

        Args:
            transfer: The transfer.
            generation: The newest generation that is given up.
            why: What consumers are told.
            gone: Nothing will replace the blocks, and the transfer ends, unless its end has been reported for this generation or later.
            now: The time in seconds.
            kept: The blocks stay as they are until the release, so that consumers that are being served may finish with what has
                been offered, if that is enough for them; the transfer ends after that.
        """
        over = self._over.get(transfer)
        if over is not None and generation < over.least:
            return []
        if transfer not in self._records and not gone:
            if transfer in self._offers.releases:
                return []  # the coming release says the same
            return [Emit(GenerationReleased("producer", transfer, Handle(str(transfer)), generation))]
        h = self._offers.record(transfer, now)
        if kept and gone and h.offer is not None and h.offer.generation == generation and h.tokens and h.served:
            return self._offers.shorten(h, h.offer, why, now)
        h.give_up(generation)
        h.known |= gone  # so that it is kept until its end has been reported
        out: list[Action] = []
        if h.offer is None or h.offer.generation <= generation:
            out += self._offers.void(h, why, again=not gone, now=now)
        if gone:
            return out + self._offers.end(h, Outcome(why), now)
        h.revoked = generation if h.revoked is None else max(generation, h.revoked)
        return out + self._offers.releases.of(h)

    def renew(self, transfer: TransferId, now: float) -> None:
        """Renew the lease of a transfer that a consumer still means to fetch."""
        h = self._records.get(transfer)
        if h is not None:
            h.claimed = True
            self._offers.lend(h, now)

    def close(self, why: Failure, now: float) -> list[Action]:
        """End every offer, present and future, with ``why``, and tell those who are being served that this agent is gone."""
        return self._offers.close(why, now)

    # --- from the runtime ------------------------------------------------------------------------------------------

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        """Record a new link, on which a consumer rank has said hello."""
        self._links[link] = ConsumerLink(info)
        return []

    def link_down(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """End what a lost consumer rank was being served; the offer stays for another lease."""
        out: list[Action] = []
        for serve in self._serves.unlink(link):
            if serve.on(E.LINK_DOWN):
                serve.not_served(why)
                if not serve.record.lives(serve.reader):
                    serve.record.readers.on(serve.reader, ReaderEvent.LEAVE)
                self._serves.distrust_announced(serve)
                self._offers.lend(serve.record, now)
            out += serve.aborts + self._serves.finish(serve, now)
        return out

    def message(self, link: LinkId, msg: m.ToProducer, now: float) -> list[Action]:
        """Handle a message from a consumer rank. Anything late, repeated or unknown changes nothing."""
        known, serve = self._links.get(link), self._serves.get(link, msg.attempt)
        if known is None or (serve is not None and serve.request.transfer != msg.transfer):
            return []
        match msg:
            case m.CloseAttempt():
                return self._close_attempt(link, serve, msg, now)
            case m.Committed():
                return self._committed(link, serve, msg, now)
        said = self._serves.final_replies.get(known.info.peer, msg.attempt)
        if said is not None:
            return [Send(link, said)]
        match msg:
            case m.FetchRequest():
                return self._fetch_request(link, msg, now) if serve is None else []
            case m.CommitRequest() if serve is not None:
                return self._commit_request(serve, msg, now)
            case m.CommitRequest():  # perhaps of an earlier link; then the consumer may ask again
                closed = m.AttemptClosed(msg.transfer, msg.attempt, K.WITHDRAWN, "it is not being served", True)
                return [Send(link, closed)]
            case _:
                assert_never(msg)

    def moved(self, done: Moved, now: float) -> list[Action]:
        """Handle the end of a part on this side."""
        return self._serves.moved(done, now)

    def moving(self, news: Moving) -> list[Action]:
        """Handle how far parts have got that are still on their way."""
        return self._serves.moving(news)

    def hashed(self, done: Hashed, now: float) -> list[Action]:
        """Handle the checksum of an announced part on this side."""
        serve = self._serves.hashed(done)
        if serve is None:
            return []
        out: list[Action] = []
        if done.failure is not None:
            out += self._stop(serve, done.failure.about("the bytes cannot be checked: "), False, now)
        elif serve.commit is not None and not serve.hashing:
            out += self._commit_request(serve, serve.commit, now)
        elif serve.live and serve.final and not serve.hashing:
            out.append(Send(serve.link, serve.checksums()))
        return out + self._serves.finish(serve, now)

    def tick(self, now: float) -> list[Action]:
        """Handle leases and deadlines. Call it when ``next_tick`` is due."""
        self._early.forget(now)
        return self._offers.tick(now)

    def next_tick(self) -> float | None:
        """Return when ``tick`` next has something to do, or ``None``."""
        due = self._offers.next(), self._early.next()
        return min([at for at in due if at is not None], default=None)

    def banded(self, transfer: TransferId, tokens: int) -> bool:
        """Return whether a consumer waits for bands of layers of this transfer, up to this token. Any thread."""
        h = self._records.get(transfer)
        serves = [] if h is None else list(h.serves.values())
        return any(s.banded and s.live and not s.final and min(s.sent) < tokens for s in serves)

    def holds(self, transfer: TransferId) -> bool:
        """Return whether the transfer is offered or wanted, and has not ended. Any thread."""
        return transfer in self._records

    def awaited(self, transfer: TransferId) -> bool:
        """Return whether a consumer is being served, or waits for the transfer."""
        h = self._records.get(transfer)
        return h is not None and bool(h.serves)

    def releases(self, transfer: TransferId) -> bool:
        """Return whether the engine is still to hear that the transfer is released."""
        h = self._records.get(transfer)
        return (h is not None and h.known) or transfer in self._offers.releases

    def pace(self, link: LinkId) -> float:
        """Return how many bytes a second this side writes over a link; 0 if that is not known, or it does not write. Any thread."""
        known = self._links.get(link)
        return known.pace.bytes_per_s if known is not None and known.info.mode == "write" else 0.0

    def serving(self, link: LinkId) -> bool:
        """Return whether something was announced over the link and has not ended."""
        known = self._links.get(link)
        return known is not None and any(s.state is not S.WAITING for s in known.serves.values())

    def __len__(self) -> int:
        """Return the number of offer records that have not ended or are not released."""
        return len(self._records) + len({id(s.record) for s in list(self._serves.values()) if s.record.outcome})

    @property
    def offered(self) -> int:
        """The number of the engine's offers that have not ended or are not released. Any thread."""
        records = [*list(self._records.values()), *(s.record for s in list(self._serves.values()))]
        return len({id(h) for h in records if h.known})

    # --- inside ----------------------------------------------------------------------------------------------------

    def _fetch_request(self, link: LinkId, request: m.FetchRequest, now: float) -> list[Action]:
        over = self._over.get(request.transfer)
        if (
            over is not None
            and request.transfer not in self._records
            and (request.least < over.least or self._offers.closed)
        ):
            return [self._serves.refuse(link, request, self._offers.told(over.outcome), now)]
        reader = self._links[link].info.peer
        h = self._records.get(request.transfer) or OfferRecord(request.transfer, now, now)
        older = [s for s in h.serves.values() if s.reader == reader]
        if older and max(s.request.attempt for s in older) > request.attempt:
            return [self._serves.refuse(link, request, Failure(K.CANCELLED, "a newer fetch request has come"), now)]
        serve, lost = self._serves.add(h, link, request, now)
        if serve is None:
            closed = m.AttemptClosed(request.transfer, request.attempt, MANY.kind, MANY.detail, False)
            return [Send(link, closed)]
        self._records[request.transfer] = h
        h.readers.on(reader, ReaderEvent.ASK)
        if len(self._early):
            self._early.pop(reader, request.transfer.brief)
        out: list[Action] = []
        for other in lost:
            out += self._stop(other, MANY, False, now)
        for old in older:
            out += self._stop(old, Failure(K.CANCELLED, "its consumer has asked again"), False, now)
        return out + self._serves.advance(serve, now)

    def _commit_request(self, serve: RankServe, msg: m.CommitRequest, now: float) -> list[Action]:
        offer = serve.record.offer
        held = offer is not None and offer.generation == msg.generation == serve.generation and serve.final
        if held and serve.live and serve.hashing:
            serve.commit = msg  # answered once this side's checksum is known
            return []
        if held and serve.live and msg.checksum != m.pack_checksum(serve.checksum):
            self.corrupt += 1
            why = Failure(K.CORRUPT, "the bytes that arrived are not those that were sent")
            return self._stop(serve, why, False, now)
        if not held or serve.state is not S.SERVING:
            given_up = Failure(K.REVOKED, "the producer's blocks are no longer those that were announced")
            return self._stop(serve, given_up, False, now)
        ack = m.CommitAck(msg.transfer, msg.attempt, msg.round)
        if not msg.alone:
            return [Send(serve.link, ack)]
        return [self._serves.last_word(serve.link, ack, now), *self._offers.settle(serve, now)]

    def _committed(self, link: LinkId, serve: RankServe | None, msg: m.Committed, now: float) -> list[Action]:
        """Record that a reader has everything that it wanted, whatever has happened to the blocks since."""
        h, reader = self._records.get(msg.transfer), self._links[link].info.peer
        # For a late FetchRequest of it.
        self._serves.remember(link, m.CommitAck(msg.transfer, msg.attempt, None), now)
        if serve is not None and serve.final and serve.state is S.SERVING:
            return self._offers.settle(serve, now)
        if h is None or msg.digest != h.digest:
            return []
        h.heard(reader, ReaderEvent.SETTLE, msg.readers)
        return self._offers.count(h, DELIVERED, now)

    def _close_attempt(self, link: LinkId, serve: RankServe | None, msg: m.CloseAttempt, now: float) -> list[Action]:
        """End an attempt that a reader gives up, if it still exists, and count the reader out unless another attempt follows."""
        h, reader = self._records.get(msg.transfer), self._links[link].info.peer
        why = m.failure(msg, self._links[link].info.name, "the consumer dropped it: ")
        out: list[Action] = []
        if msg.again:
            pass  # the next attempt follows
        elif h is None or h.digest is None:
            if self._over.get(msg.transfer) is None:
                self._early.put(reader, msg.transfer.brief, GivenUp.of(msg), now, self._links[link].info.owner)
        elif (
            msg.digest == h.digest and not h.lives(reader, but=serve) and h.heard(reader, ReaderEvent.DROP, msg.readers)
        ):
            out += self._offers.count(h, Outcome(why), now)
        if serve is not None:
            return out + self._stop(serve, why, False, now)
        said = self._serves.final_replies.get(reader, msg.attempt)
        if not isinstance(said, m.AttemptClosed):
            said = m.AttemptClosed(msg.transfer, msg.attempt, K.WITHDRAWN, "it is not being served", False)
        # Also the answer to a late FetchRequest of it.
        return [*out, self._serves.last_word(link, said, now)]
