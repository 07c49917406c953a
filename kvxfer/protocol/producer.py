"""The producer's half of the protocol as a sans-IO state machine: events in, actions out, the clock an argument.

An *offer record* is one transfer as this rank knows it: what the engine offered, and one *rank serve* for each attempt of a
consumer rank that wants it. The life of a rank serve is the table ``transitions.RANK_SERVE``. Fetch request and offer meet
here, whichever comes first. An offer is leased: it ends when nobody has asked for it in time. A rank serve ends by the
consumer's own deadlines, for the first part and for the rest, or the producer's where that is sooner. Only who knows the
digest of an offer is a reader of it.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.geometry import PlanError
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.budgets import Keep, PeerBudgets
from kvxfer.protocol.offer_record import (
    ConsumerLink,
    Early,
    Key,
    OfferRecord,
    Over,
    RankServe,
    announce,
    delivered_bytes,
    follows,
    plan_for,
    told,
    unfit,
    unsent,
)
from kvxfer.protocol.parts import Span, cuts
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.timers import Recent, Timers
from kvxfer.protocol.transitions import ServeEvent, ServeState
from kvxfer.protocol.values import (
    Action,
    Close,
    Emit,
    Ended,
    GenerationReleased,
    Hashed,
    LinkId,
    LinkInfo,
    Moved,
    Released,
    Send,
)
from kvxfer.values import Offer

__all__ = ["ProducerMachine"]

S, E, K = ServeState, ServeEvent, FailureKind

# A flood fills no memory, and keeps nobody else's requests out (see ``budgets.py``):
MOST_BYTES, REQUEST_BYTES = 80 << 20, 2 << 10
"""What the fetch requests that are alive may take, and what one takes beside its block table as that was on the wire."""
MANY = Failure(K.OVERLOADED, "too many fetch requests at once")
MOST_WORDS = 100_000
"""Answers that are remembered, ends, and readers that gave something up before it was offered."""

GRACE_S = 1.0
"""How long a rank waits for an offer that its engine has made by the consumer's word: ranks of a step may lag."""


class ProducerMachine:
    """All offer records of one agent.

    Not thread-safe. Methods that take an event return the actions that it asks for. ``now`` is the time in seconds, always by the
    same clock.

    Args:
        lease: seconds for which an offer is kept with nobody asking for it, and for which answers are remembered.
        longest: seconds for which a fetch request is kept at most, whatever it says.
        revocations: counts what is given up that was announced; ``None`` means a counter of its own.

    Attributes:
        corrupt: how often other bytes arrived than were sent.
    """

    def __init__(self, lease: float, longest: float, revocations: RevocationCounter | None = None) -> None:
        self._lease, self._longest = lease, longest
        self._revocations = revocations or RevocationCounter()
        self.corrupt = 0
        self._closed: Outcome | None = None
        self._records: dict[TransferId, OfferRecord] = {}
        self._serves: dict[Key, RankServe] = {}  # those of ended offer records included
        self._links: dict[LinkId, ConsumerLink] = {}
        self._leases: Timers[TransferId] = Timers()
        self._budgets: Timers[Key] = Timers()
        # For questions that are repeated after all has been said, on whatever link: by the reader's epoch and attempt.
        self._last_words: Keep[int, int, m.CommitAck | m.AttemptClosed] = Keep(lease, MOST_WORDS)
        self._early = Early(lease, MOST_WORDS)
        self._over: Recent[TransferId, Over] = Recent(lease, MOST_WORDS)
        self._room: PeerBudgets[LinkId, Key] = PeerBudgets(MOST_BYTES)

    # --- from the engine -------------------------------------------------------------------------------------------

    def offer(self, offer: Offer, now: float, called: float | None = None) -> list[Action]:
        """Offer blocks, or more of them.

        What does not continue or replace the last offer is ignored: a generation that was revoked or whose end has been reported,
        or less than is known.

        Args:
            offer: what the engine offers.
            now: the time in seconds.
            called: when the engine offered it; ``None`` means now.
        """
        over = self._over.get(offer.transfer)
        if over is not None and offer.generation < over.least:
            return []
        h = self._record(offer.transfer, now if called is None else called)
        old = h.offer
        if offer.generation < h.least or (old is not None and not follows(offer, old)):
            return []
        if self._closed is not None:
            h.known, h.generation = True, offer.generation
            return self._end(h, self._closed, now)
        out: list[Action] = []
        if old is not None and offer.generation > old.generation:
            out += self._void(h, Failure(K.REVOKED, "the producer computed it anew"), again=True, now=now)
        h.take(offer)
        self._lend(h, now)
        for serve in list(h.serves.values()):
            out += self._advance(serve, now)
        for reader, readers in self._early.take(offer.transfer, offer.digest).items():
            if h.outcome is None and not h.lives(reader):
                h.admit(reader, readers)
                h.drop(reader)
                gave_up = Failure(K.CANCELLED, "its consumer gave it up before it was there")
                out += self._count(h, Outcome(gave_up), now)
        if old is not None and offer.consumers < old.consumers and h.outcome is None:
            out += self._count(h, DELIVERED, now)
        return out

    def revoke(
        self, transfer: TransferId, generation: int, why: Failure, gone: bool, now: float, kept: bool = False
    ) -> list[Action]:
        """Give the blocks of this generation and of older ones up.

        Args:
            transfer: whose blocks they are.
            generation: the newest that is given up.
            why: what consumers are told.
            gone: nothing will replace the blocks, and the transfer ends, unless its end has been reported before.
            now: the time in seconds.
            kept: the blocks stay as they are until the release, so that those who are being served may finish with what has
                been offered, if that is enough for them; the transfer ends after that.
        """
        over = self._over.get(transfer)
        if over is not None and generation < over.least:
            return []
        if transfer not in self._records and not gone:
            return [Emit(GenerationReleased("producer", transfer, str(transfer), generation))]
        h = self._record(transfer, now)
        if kept and gone and h.offer is not None and h.offer.generation == generation and h.tokens and h.served:
            return self._shorten(h, h.offer, why, now)
        h.give_up(generation)
        h.known |= gone  # now at the latest, so that it is kept until its end has been told
        out: list[Action] = []
        if h.offer is None or h.offer.generation <= generation:
            out += self._void(h, why, again=not gone, now=now)
        if gone:
            return out + self._end(h, Outcome(why), now)
        h.revoked = generation if h.revoked is None else max(generation, h.revoked)
        return out + self._release_revoked(h)

    def renew(self, transfer: TransferId, now: float) -> None:
        """Renew the lease of a transfer that somebody still means to fetch."""
        h = self._records.get(transfer)
        if h is not None:
            self._lend(h, now)

    def close(self, why: Failure, now: float) -> list[Action]:
        """End every offer, present or still to come, with ``why``, and tell those who are being served that we are gone."""
        self._closed = Outcome(why)
        out: list[Action] = []
        for h in list(self._records.values()):
            out += self._end(h, self._closed, now)
        return out

    # --- from the shell --------------------------------------------------------------------------------------------

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        """Take a new link, on which a consumer rank has said hello."""
        self._links[link] = ConsumerLink(info)
        return []

    def link_down(self, link: LinkId, why: Failure, now: float) -> list[Action]:
        """End what a lost consumer rank was being served; the offer stays for another lease."""
        known = self._links.pop(link, None)
        out: list[Action] = []
        for serve in [] if known is None else list(known.serves.values()):
            if serve.on(E.LINK_DOWN):
                serve.record.leave(serve.reader)
                self._forsake(serve)
                self._lend(serve.record, now)
            out += serve.aborts + self._drop_if_over(serve, now)
        return out

    def message(self, link: LinkId, msg: m.ToProducer, now: float) -> list[Action]:
        """Handle a message from a consumer rank. Anything late, repeated or unknown changes nothing."""
        known, serve = self._links.get(link), self._serves.get((link, msg.attempt))
        if known is None or (serve is not None and serve.request.transfer != msg.transfer):
            return []
        said = self._last_words.get(known.info.peer, msg.attempt)
        match msg:
            case m.CloseAttempt():
                return self._close_attempt(link, serve, msg, now)
            case m.Committed():
                return self._committed(link, serve, msg, now)
            case m.FetchRequest() | m.CommitRequest() if said is not None:
                return [Send(link, said)]
            case m.FetchRequest():
                return self._fetch_request(link, msg, now) if serve is None else []
            case m.CommitRequest() if serve is not None:
                return self._commit_request(serve, msg, now)
            case m.CommitRequest():  # of a link before this one, perhaps; then the consumer may want it again
                closed = m.AttemptClosed(msg.transfer, msg.attempt, K.WITHDRAWN, "it is not being served", True)
                return [Send(link, closed)]
            case _:
                assert_never(msg)

    def moved(self, done: Moved, now: float) -> list[Action]:
        """Handle the end of a part on this side."""
        serve = self._serves.get((done.ref.link, done.ref.attempt))
        if serve is None or done.ref not in serve.flight:
            return []
        out: list[Action] = []
        if done.quiet:
            serve.flight.discard(done.ref)
        ready = serve.unsent.pop(done.ref, None)
        if done.failure is None:
            if done.ref.link in self._links:
                self._links[done.ref.link].pace.took(done.nbytes, done.seconds)
            if ready is not None and serve.state is S.SERVING:
                out.append(Send(serve.link, ready))
        elif done.collateral:
            out += self._stop(serve, done.failure.about("the link broke: "), True, now)
        else:
            # Of a failed write the consumer knows nothing, and a link that is of no more use has to be made anew.
            broken = serve.live and done.ref.link in self._links and self._links[done.ref.link].info.mode == "write"
            out += self._stop(serve, done.failure.about("sending failed: "), False, now)
            out += [Close(done.ref.link, done.failure)] if broken else []
        return out + self._say_closed(serve, now) + self._drop_if_over(serve, now)

    def hashed(self, done: Hashed, now: float) -> list[Action]:
        """Handle the checksum of what we announced with a part."""
        serve = self._serves.get((done.ref.link, done.ref.attempt))
        if serve is None or done.ref not in serve.hashing:
            return []
        serve.hashing.discard(done.ref)
        serve.checksum += done.value
        out: list[Action] = []
        if done.failure is not None:
            out += self._stop(serve, done.failure.about("the bytes cannot be checked: "), False, now)
        elif serve.commit is not None and not serve.hashing:
            out += self._commit_request(serve, serve.commit, now)
        elif serve.live and serve.final and not serve.hashing:
            request = serve.request
            out.append(
                Send(serve.link, m.Checksums(request.transfer, request.attempt, m.pack_checksum(serve.checksum)))
            )
        return out + self._say_closed(serve, now) + self._drop_if_over(serve, now)

    def tick(self, now: float) -> list[Action]:
        """Handle leases and deadlines. Call it when ``next_tick`` is due."""
        out: list[Action] = []
        for key in self._budgets.due(now):
            serve = self._serves[key]
            if serve.live and now < serve.expires and serve.record.known:
                self._budgets.set(key, serve.expires)
            elif serve.live:
                out += self._stop(serve, *_overdue(serve, now), now)
            else:  # settled or ending, and something of it still moves
                self._budgets.set(key, now + self._lease)
                out += serve.aborts
        for transfer in self._leases.due(now):
            out += self._expire(self._records[transfer], now)
        self._last_words.forget(now)
        self._early.forget(now)
        self._over.forget(now)
        return out

    def next_tick(self) -> float | None:
        """Return when ``tick`` has something to do next, or ``None``."""
        clocks = self._budgets, self._leases, self._last_words, self._early, self._over
        return min((t for clock in clocks if (t := clock.next()) is not None), default=None)

    def banded(self, transfer: TransferId, tokens: int) -> bool:
        """Return whether somebody waits for bands of layers of this transfer, up to this token. Any thread."""
        h = self._records.get(transfer)
        serves = [] if h is None else list(h.serves.values())
        return any(s.banded and s.live and not s.final and min(s.sent) < tokens for s in serves)

    def holds(self, transfer: TransferId) -> bool:
        """Return whether the transfer is offered or wanted, and has not ended."""
        return transfer in self._records

    def serving(self, link: LinkId) -> bool:
        """Return whether something was announced over the link of which the end is still to come."""
        known = self._links.get(link)
        return known is not None and any(s.state is not S.WAITING for s in known.serves.values())

    def __len__(self) -> int:
        """Return the number of offer records whose end or release is still to come."""
        return len(self._records) + len({id(s.record) for s in list(self._serves.values()) if s.record.outcome})

    @property
    def offered(self) -> int:
        """How many offers are neither over nor released. Any thread."""
        records = [*list(self._records.values()), *(s.record for s in list(self._serves.values()))]
        return len({id(h) for h in records if h.known})

    # --- inside ----------------------------------------------------------------------------------------------------

    def _record(self, transfer: TransferId, now: float) -> OfferRecord:
        h = self._records.get(transfer)
        if h is None:
            h = self._records[transfer] = OfferRecord(transfer, now, now)
        return h

    def _lend(self, h: OfferRecord, now: float) -> None:
        """Keep the offer for a lease from now."""
        if h.known and h.outcome is None:
            h.leased = now + self._lease
            self._leases.set(h.transfer, h.leased)

    def _expire(self, h: OfferRecord, now: float) -> list[Action]:
        """End an offer whose lease has run out, or extend the lease while somebody is being served."""
        live = [s.expires for s in h.serves.values() if s.state not in (S.SETTLED, S.ENDED)]
        if live:
            self._leases.set(h.transfer, max(now, *live) + self._lease)
            return []
        whose = f", by all {h.consumers} engines that it is for" if h.consumers > 1 else ""
        why = Failure(K.TIMED_OUT, f"it was not fetched within the lease of {self._lease:g} s{whose}")
        return self._end(h, Outcome(why), now)

    def _fetch_request(self, link: LinkId, request: m.FetchRequest, now: float) -> list[Action]:
        over = self._over.get(request.transfer)
        if over is not None and request.transfer not in self._records and (request.least < over.least or self._closed):
            return [self._refuse(link, request, self._told(over.outcome), now)]
        reader = self._links[link].info.peer
        h = self._records.get(request.transfer) or OfferRecord(request.transfer, now, now)
        older = [s for s in h.serves.values() if s.reader == reader]
        if any(s.request.attempt > request.attempt for s in older):
            return [self._refuse(link, request, Failure(K.CANCELLED, "a newer fetch request has come"), now)]
        seconds = min(request.seconds, self._longest)
        key, lent = (link, request.attempt), seconds < request.seconds
        known = self._links[link]
        sent = [request.start] * known.info.planner.bands
        serve = RankServe(h, link, key, request, reader, now + seconds, lent, sent, known.banded(request))
        lost = self._room.take(link, serve.key, REQUEST_BYTES + serve.nbytes)
        if lost is None:
            closed = m.AttemptClosed(request.transfer, request.attempt, MANY.kind, MANY.detail, False)
            return [Send(link, closed)]
        self._records[request.transfer] = h
        h.serves[serve.key] = self._serves[serve.key] = self._links[link].serves[request.attempt] = serve
        self._budgets.set(serve.key, min(now + GRACE_S, serve.expires) if request.offered else serve.expires)
        h.dropped.discard(reader)
        h.misfits.discard(reader)
        self._early.pop(reader, request.transfer)
        out: list[Action] = []
        for key in lost:
            out += self._stop(self._serves[key], MANY, False, now)
        for old in older:
            out += self._stop(old, Failure(K.CANCELLED, "its consumer wants it anew"), False, now)
        return out + self._advance(serve, now)

    def _advance(self, serve: RankServe, now: float) -> list[Action]:
        """Announce to one consumer what has become ready for it."""
        offer, link, request = serve.record.offer, self._links.get(serve.link), serve.request
        if offer is None or link is None or not serve.live or serve.final:
            return []
        info = link.info
        why = unfit(offer, request, info)
        if why is not None and serve.record.short is not None and why.kind is K.NEVER_OFFERED:
            why = told(Outcome(serve.record.short))
        if why is not None:
            serve.record.reject(serve.reader, request.digest)
            return self._stop(serve, why, False, now)
        serve.record.admit(serve.reader, request.readers)
        if offer.generation < request.least:
            return []  # another rank of ours has given it up already; we hear of that next
        spans = unsent(serve, info)
        out: list[Action] = []
        for span in spans:
            if serve.live:
                out += self._announce(serve, link, offer, span, offer.final and span is spans[-1], now)
        return out

    def _announce(
        self, serve: RankServe, link: ConsumerLink, offer: Offer, span: Span, final: bool, now: float
    ) -> list[Action]:
        """Announce what is ready, in one part or in several."""
        info, plan, lo, ends = link.info, None, span.lo, [span.hi]
        if not info.unattended:
            try:
                plan = plan_for(serve, info, offer, span, final)
            except PlanError as e:
                return self._stop(serve, Failure(K.MISUSE, f"the block tables do not join: {e}"), False, now)
            ends = cuts(lo, span.hi, plan, info)
        if serve.revocations is None:
            serve.revocations = self._revocations.vouch(serve.request.transfer)
        if serve.state is S.WAITING and serve.request.moving:
            serve.expires = now + min(serve.request.moving, self._longest)
            self._budgets.set(serve.key, serve.expires)
        out: list[Action] = []
        for end in ends:
            if serve.part >= m.MAX_PARTS:
                many = Failure(K.OVERLOADED, f"it came in more than {m.MAX_PARTS} parts")
                return out + self._stop(serve, many, False, now)
            part, last = span if len(ends) == 1 else Span(lo, end, span.bands), final and end == span.hi
            if len(ends) > 1:
                plan = plan_for(serve, info, offer, part, last)
            out += announce(serve, link, offer, plan, part, last)
            lo = end
        return out

    def _commit_request(self, serve: RankServe, msg: m.CommitRequest, now: float) -> list[Action]:
        offer = serve.record.offer
        held = offer is not None and offer.generation == msg.generation == serve.generation and serve.final
        if held and serve.live and serve.hashing:
            serve.commit = msg  # answered once we know our own checksum
            return []
        if held and serve.live and msg.checksum != m.pack_checksum(serve.checksum):
            self.corrupt += 1
            return self._stop(
                serve, Failure(K.CORRUPT, "the bytes that arrived are not those that were sent"), False, now
            )
        if not held or serve.state is not S.SERVING:
            given_up = Failure(K.REVOKED, "the producer's blocks are not those that were announced")
            return self._stop(serve, given_up, False, now)
        ack = m.CommitAck(msg.transfer, msg.attempt, msg.round)
        if not msg.alone:
            return [Send(serve.link, ack)]
        return [self._last_word(serve.link, ack, now), *self._settle(serve, now)]

    def _committed(self, link: LinkId, serve: RankServe | None, msg: m.Committed, now: float) -> list[Action]:
        """Note that a reader has all that it wanted; what we have done with the blocks since does not matter to it."""
        h, reader = self._records.get(msg.transfer), self._links[link].info.peer
        self._last_words.put(
            reader, msg.attempt, m.CommitAck(msg.transfer, msg.attempt, None), now
        )  # should its FetchRequest come late
        if serve is not None and serve.final and serve.state is S.SERVING:
            return self._settle(serve, now)
        if h is None or msg.digest != h.digest:
            return []
        h.admit(reader, msg.readers)
        h.settled.add(reader)
        return self._count(h, DELIVERED, now)

    def _settle(self, serve: RankServe, now: float) -> list[Action]:
        """Count one more reader that has it all."""
        serve.on(E.SETTLE)
        h, link = serve.record, self._links.get(serve.link)
        h.settled.add(serve.reader)
        if link is not None and h.offer is not None:
            h.nbytes += delivered_bytes(serve, link.info, h.offer)
        out = self._drop_if_over(serve, now) + self._count(h, DELIVERED, now)
        if not serve.quiet:
            self._budgets.set(serve.key, now + self._lease)
        self._lend(h, now)  # for the others that it is for
        return out

    def _close_attempt(self, link: LinkId, serve: RankServe | None, msg: m.CloseAttempt, now: float) -> list[Action]:
        """End an attempt that a reader gives up, and count the reader out unless another attempt follows.

        There may be nothing left of the attempt to end.
        """
        h, reader = self._records.get(msg.transfer), self._links[link].info.peer
        why = m.failure(msg, self._links[link].info.name, "the consumer dropped it: ")
        out: list[Action] = []
        if msg.again:
            pass  # the next attempt follows
        elif h is None or h.digest is None:
            if self._over.get(msg.transfer) is None:
                self._early.put(reader, msg.transfer, (msg.digest, max(msg.readers, 1)), now)
        elif msg.digest == h.digest and reader not in h.misfits | h.settled and not h.lives(reader, but=serve):
            h.admit(reader, msg.readers)
            h.drop(reader)
            out += self._count(h, Outcome(why), now)
        if serve is not None:
            return out + self._stop(serve, why, False, now)
        said = self._last_words.get(reader, msg.attempt)
        if not isinstance(said, m.AttemptClosed):
            said = m.AttemptClosed(msg.transfer, msg.attempt, K.WITHDRAWN, "it is not being served", False)
        # Also the answer to its FetchRequest, should that come later.
        return [*out, self._last_word(link, said, now)]

    def _count(self, h: OfferRecord, last: Outcome, now: float) -> list[Action]:
        """End the transfer here if all readers are done with it, one way or the other."""
        if h.outcome is not None or not h.done:
            return []
        if last.delivered and not h.whole:
            last = Outcome(Failure(K.CANCELLED, "one of its readers dropped it"))
        return self._end(h, last, now)

    def _void(self, h: OfferRecord, why: Failure, *, again: bool, now: float) -> list[Action]:
        """Void the offer and stop what serves it. Those that only wait may go on if something is still to come."""
        h.offer = None
        out: list[Action] = []
        for serve in list(h.serves.values()):
            if serve.state is S.SERVING or not again:
                out += self._stop(serve, why, again, now)
        return out

    def _shorten(self, h: OfferRecord, offer: Offer, why: Failure, now: float) -> list[Action]:
        """Make what has been offered all that there is, for those who are being served."""
        h.short, h.offer = why, replace(offer, final=True, tokens=h.tokens, bands=0)
        out: list[Action] = []
        for serve in list(h.serves.values()):
            out += self._advance(serve, now)
        return out

    def _stop(self, serve: RankServe, why: Failure, again: bool, now: float) -> list[Action]:
        """End one rank serve, unless it has ended.

        What moves is aborted, and ``AttemptClosed`` is sent once nothing of ours moves any more.
        """
        if not serve.on(E.STOP):
            return []
        self._forsake(serve)
        serve.why, serve.again = why, again
        serve.unsent.clear()
        self._budgets.set(serve.key, now + self._lease)
        return serve.aborts + self._say_closed(serve, now)

    def _forsake(self, serve: RankServe) -> None:
        """Count that what was announced to this consumer can be trusted no more."""
        if serve.revocations is not None:
            self._revocations.count()

    def _say_closed(self, serve: RankServe, now: float) -> list[Action]:
        if serve.state is not S.ENDING or not serve.quiet or serve.why is None:
            return []
        serve.on(E.QUIET)
        closed = m.AttemptClosed(
            serve.request.transfer, serve.request.attempt, serve.why.kind, serve.why.detail, serve.again
        )
        return [self._last_word(serve.link, closed, now), *self._drop_if_over(serve, now)]

    def _refuse(self, link: LinkId, request: m.FetchRequest, why: Failure, now: float) -> Send:
        """Answer that this is not to be had."""
        return self._last_word(
            link, m.AttemptClosed(request.transfer, request.attempt, why.kind, why.detail, False), now
        )

    def _told(self, outcome: Outcome) -> Failure:
        """Return what those who still want a transfer that has ended so are told."""
        if outcome is self._closed and outcome.failure is not None:
            return Failure(K.PEER_LOST, outcome.failure.detail)
        return told(outcome)

    def _last_word(self, link: LinkId, word: m.CommitAck | m.AttemptClosed, now: float) -> Send:
        """Send what there is to say of an attempt that is over, and keep it for whenever it is asked about again."""
        if link in self._links:
            self._last_words.put(self._links[link].info.peer, word.attempt, word, now)
        return Send(link, word)

    def _drop_if_over(self, serve: RankServe, now: float) -> list[Action]:
        """Forget a rank serve that has ended and is quiet, and what was kept only for it."""
        if serve.state not in (S.SETTLED, S.ENDED) or not serve.quiet or serve.key not in self._serves:
            return []
        h = serve.record
        del self._serves[serve.key], h.serves[serve.key]
        if serve.link in self._links:
            del self._links[serve.link].serves[serve.request.attempt]
        self._room.give(serve.link, serve.key)
        self._budgets.cancel(serve.key)
        out = self._release_revoked(h) + self._release(h)
        if not h.known and not h.serves and h.outcome is None:
            del self._records[h.transfer]  # it was wanted only
        elif h.short is not None and h.outcome is None and not h.served:
            out += self._count(h, DELIVERED, now) + self._end(h, Outcome(h.short), now)
        elif h.settled:  # and this was perhaps the last that others waited for
            out += self._count(h, DELIVERED, now)
        return out

    def _end(self, h: OfferRecord, outcome: Outcome, now: float) -> list[Action]:
        if h.outcome is not None:
            return []
        h.outcome = outcome
        h.offer = None
        del self._records[h.transfer]
        self._leases.cancel(h.transfer)
        self._over.put(h.transfer, Over(outcome, h.next_generation), now)
        out: list[Action] = []
        if h.known:
            ended = Ended("producer", h.transfer, h.name, outcome, h.nbytes, now - h.began, h.generation)
            out.append(Emit(ended))
            if not h.serves:
                out += self._release(h)
        for serve in list(h.serves.values()):
            out += self._stop(serve, self._told(outcome), False, now)
        return out

    def _release(self, h: OfferRecord) -> list[Action]:
        """Release the engine's blocks once nothing of the offer record moves; this comes once, with its last rank serve."""
        if h.outcome is None or h.serves or not h.known:
            return []
        return [Emit(Released("producer", h.transfer, h.name, h.generation))]

    def _release_revoked(self, h: OfferRecord) -> list[Action]:
        """Release what was revoked of a transfer that goes on, once nothing of that moves."""
        if h.revoked is None or h.outcome is not None or h.serves_of(h.revoked):
            return []
        generation, h.revoked = h.revoked, None
        return [Emit(GenerationReleased("producer", h.transfer, h.name, generation))]


def _overdue(serve: RankServe, now: float) -> tuple[Failure, bool]:
    """Return why a serve whose time is over ends, and whether its consumer may ask anew."""
    if now < serve.expires:
        return Failure(K.WITHDRAWN, "it was offered, by the consumer's word, and is not known here any more"), False
    waited = serve.state is S.WAITING
    why = Failure(K.NEVER_OFFERED if waited else K.TIMED_OUT, "the consumer's time for it is over")
    return why, serve.lent and waited
