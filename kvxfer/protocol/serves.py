"""The rank serves: the live attempts of consumers, within budgets of memory and of time."""

from __future__ import annotations

from collections.abc import Callable, ValuesView

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.geometry import PlanError
from kvxfer.protocol import messages as m
from kvxfer.protocol.announcements import announce, delivered_bytes, plan_for, unfit, untold
from kvxfer.protocol.offer_record import MAX_KEPT_REASON, ConsumerLink, Key, OfferRecord, RankServe, told
from kvxfer.protocol.parts import Span, cut
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.shares import ExpiringMap, Shares
from kvxfer.protocol.timers import Timers
from kvxfer.protocol.transitions import ReaderEvent, ServeEvent, ServeState
from kvxfer.protocol.values import Action, Close, Hashed, LinkId, Moved, Moving, Send
from kvxfer.values import Offer

S, E, K = ServeState, ServeEvent, FailureKind

# A flood of requests cannot fill memory, or keep other peers' requests out (see ``shares.py``):
MAX_BYTES, REQUEST_BYTES = 80 << 20, 2 << 10
"""The most bytes of all live fetch requests, and the bytes that each counts for in addition to its block table."""
MANY = Failure(K.OVERLOADED, "too many fetch requests at once")
MAX_WORDS, MAX_KEPT_NAME = 100_000, 512
"""The most answers that are remembered, and the most bytes of their transfers' names."""

GRACE_S = 1.0
"""How long a rank waits for an offer that the consumer says was made, because ranks may lag behind each other in a step."""

CONSUMER_FIRST_S = 1.0
"""How much longer a serve may take than its consumer allows, because the consumer knows how far it has got, and says so when it ends it."""

LastWord = m.CommitAck | m.AttemptClosed


class Serves:
    """The live rank serves, and the last message about each that is over.

    Args:
        lease: Seconds for which last messages are remembered, and after which what still moves is aborted again.
        longest: The most seconds for which a fetch request is kept, whatever it says.
        revocations: Counts what was announced and is given up.
        over: Called for the offer once a serve of it is over and nothing of that moves any more.

    Attributes:
        links: The consumer ranks that have said hello.
        final_replies: The last message about each attempt that is over, by the reader's epoch and attempt, to be repeated if the
            consumer asks again, over any link.
    """

    def __init__(
        self,
        lease: float,
        longest: float,
        revocations: RevocationCounter,
        over: Callable[[OfferRecord, float], list[Action]],
    ) -> None:
        self.links: dict[LinkId, ConsumerLink] = {}
        self._lease, self._longest = lease, longest
        self._revocations, self._over = revocations, over
        self._serves: dict[Key, RankServe] = {}  # including those of ended offer records
        self._times: Timers[Key] = Timers()
        self._room: Shares[LinkId, Key] = Shares(MAX_BYTES, "newest")
        self.final_replies: ExpiringMap[int, int, LastWord] = ExpiringMap(lease, MAX_WORDS)

    def __len__(self) -> int:
        return len(self._serves)

    def values(self) -> ValuesView[RankServe]:
        return self._serves.values()

    def get(self, link: LinkId, attempt: int) -> RankServe | None:
        return self._serves.get((link, attempt))

    def unlink(self, link: LinkId) -> list[RankServe]:
        """Forget a link that is lost, and return what was served over it."""
        known = self.links.pop(link, None)
        return [] if known is None else list(known.serves.values())

    # --- a serve's life --------------------------------------------------------------------------------------------

    def add(
        self, h: OfferRecord, link: LinkId, request: m.FetchRequest, now: float
    ) -> tuple[RankServe | None, list[RankServe]]:
        """Begin to serve a request.

        Returns:
            The serve, or ``None`` if there is no room for it; and the serves that must be stopped to make room.
        """
        consumer = self.links[link]
        seconds = min(request.seconds, self._longest)
        key, lent = (link, request.attempt), seconds < request.seconds
        sent, banded = (request.start,) * consumer.info.planner.bands, consumer.banded(request)
        serve = RankServe(h, link, key, request, consumer.info.peer, now + seconds, lent, sent, banded)
        nbytes = REQUEST_BYTES + request.blocks.nbytes + max(request.transfer.nbytes - MAX_KEPT_NAME, 0)
        lost = self._room.take(link, key, nbytes, consumer.info.owner)
        if lost is None:
            return None, []
        h.serves[key] = self._serves[key] = consumer.serves[request.attempt] = serve
        self._times.set(key, min(now + GRACE_S, serve.expires) if request.offered else serve.expires)
        return serve, [self._serves[other] for other in lost]

    def advance(self, serve: RankServe, now: float) -> list[Action]:
        """Announce to a consumer what has become ready for it."""
        offer, link, request = serve.record.offer, self.links.get(serve.link), serve.request
        if offer is None or link is None or not serve.live or serve.final:
            return []
        info = link.info
        why = unfit(offer, request, info)
        if why is not None and serve.record.short is not None and why.kind is K.NEVER_OFFERED:
            why = told(Outcome(serve.record.short))
        if why is not None:
            more = request.digest == serve.record.digest
            serve.record.heard(serve.reader, ReaderEvent.WANT_MORE if more else ReaderEvent.WANT_OTHER)
            return self.stop(serve, why, False, now)
        serve.record.heard(serve.reader, ReaderEvent.WANT, request.readers)
        if offer.generation < request.least:
            return []  # another rank of this engine has given it up already, as this one will hear
        out: list[Action] = []
        for span in (spans := untold(serve, info)):
            if serve.live:
                out += self._announce(serve, link, offer, span, offer.final and span is spans[-1], now)
        return out

    def _announce(
        self, serve: RankServe, link: ConsumerLink, offer: Offer, span: Span, final: bool, now: float
    ) -> list[Action]:
        """Announce what is ready, in one part or in several; parts that may not go yet are announced when one has ended.

        A span is planned once to be cut, and each part once more; parts that wait are not planned again each time.
        """
        info, plan = link.info, None
        parts: tuple[Span, ...] = (span,)
        left = serve.parts_left(info)
        if left <= 0:
            return []
        out: list[Action] = []
        try:
            if serve.cut and serve.begins_with_cut(span):
                parts = serve.cut
            elif not info.unattended:
                plan = plan_for(serve, info, offer, span, final)
                parts = tuple(cut(span, plan, info))
            if serve.revocations is None:
                serve.revocations = self._revocations.vouch(serve.request.transfer)
            if serve.state is S.WAITING and serve.request.moving:
                granted = min(serve.request.moving, self._longest)
                serve.lent = granted < serve.request.moving
                serve.expires = now + granted + CONSUMER_FIRST_S
                self._times.set(serve.key, serve.expires)
            serve.cut = parts[left:]
            for part in parts[:left]:
                if serve.part >= m.MAX_PARTS:
                    many = Failure(K.OVERLOADED, f"it came in more than {m.MAX_PARTS} parts")
                    return out + self.stop(serve, many, False, now)
                last = final and part.hi == span.hi
                if part is not span:
                    plan = plan_for(serve, info, offer, part, last)
                out += announce(serve, link, offer, plan, part, last)
        except PlanError as e:
            return out + self.stop(serve, Failure(K.MISUSE, f"the block tables do not join: {e}"), False, now)
        return out

    def settle(self, serve: RankServe, now: float) -> list[Action]:
        """Record that a consumer has everything."""
        serve.on(E.SETTLE)
        h, link = serve.record, self.links.get(serve.link)
        h.unserved = None
        if link is not None and h.offer is not None:
            h.nbytes += delivered_bytes(serve, link.info, h.offer)
        if not serve.quiet:
            self._times.set(serve.key, now + self._lease)
        return self.finish(serve, now)

    def stop(self, serve: RankServe, why: Failure, again: bool, now: float) -> list[Action]:
        """End one rank serve, unless it has ended.

        What moves is aborted, and ``AttemptClosed`` is sent once nothing moves on this side any more.
        """
        if not serve.on(E.STOP):
            return []
        serve.not_served(why)
        self.distrust_announced(serve)
        serve.why, serve.again = why, again
        serve.unsent.clear()
        self._times.set(serve.key, now + self._lease)
        return serve.aborts + self.finish(serve, now)

    def distrust_announced(self, serve: RankServe) -> None:
        """Count a revocation, because what was announced to this consumer can no longer be trusted."""
        if serve.revocations is not None:
            self._revocations.count()

    def finish(self, serve: RankServe, now: float) -> list[Action]:
        """Once nothing of a serve moves, tell the consumer if it is ending, and forget it if it is over."""
        if not serve.quiet:
            return []
        out: list[Action] = []
        if serve.state is S.ENDING and serve.why is not None:
            serve.on(E.QUIET)
            out.append(self.refuse(serve.link, serve.request, serve.why, now, serve.again))
        if serve.state in (S.SETTLED, S.ENDED) and serve.key in self._serves:
            del self._serves[serve.key], serve.record.serves[serve.key]
            if serve.link in self.links:
                del self.links[serve.link].serves[serve.request.attempt]
            self._room.give(serve.link, serve.key)
            self._times.cancel(serve.key)
            out += self._over(serve.record, now)
        return out

    # --- what is said last -----------------------------------------------------------------------------------------

    def last_word(self, link: LinkId, word: LastWord, now: float) -> Send:
        """Send the last message about an attempt, and remember it in case the consumer asks again."""
        if link in self.links:
            self.remember(link, word, now)
        return Send(link, word)

    def remember(self, link: LinkId, word: LastWord, now: float) -> None:
        """Remember the last message about an attempt, unless its consumer has chosen a name of absurd length for the transfer."""
        if word.transfer.nbytes <= MAX_KEPT_NAME:
            info = self.links[link].info
            self.final_replies.put(info.peer, word.attempt, word, now, info.owner)

    def refuse(self, link: LinkId, request: m.FetchRequest, why: Failure, now: float, again: bool = False) -> Send:
        """Answer that a request cannot be served (any more); ``again`` if it may be later."""
        said = why.detail[:MAX_KEPT_REASON]
        closed = m.AttemptClosed(request.transfer, request.attempt, why.kind, said, again)
        return self.last_word(link, closed, now)

    # --- events ----------------------------------------------------------------------------------------------------

    def moved(self, done: Moved, now: float) -> list[Action]:
        """Handle the end of a part on this side."""
        serve = self._serves.get((done.ref.link, done.ref.attempt))
        if serve is None or done.ref not in serve.flight:
            return []
        out: list[Action] = []
        if done.quiet:
            del serve.flight[done.ref]
        ready = serve.unsent.pop(done.ref, None)
        serve.moving.pop(done.ref, None)
        if done.failure is None:
            serve.moved += done.nbytes
            if done.ref.link in self.links:
                self.links[done.ref.link].wrote(done, now)
            if ready is not None and serve.state is S.SERVING:
                out.append(Send(serve.link, ready))
            out += self.advance(serve, now)
        elif done.collateral:
            stopped = self.stop(serve, done.failure.about("the part was given up: "), True, now)
            out += stopped or serve.aborts  # of one that is over, something may still hold a slot
        else:
            # The consumer does not know of a failed write, and a link that no longer works has to be made again.
            broken = serve.live and done.ref.link in self.links and self.links[done.ref.link].info.mode == "write"
            out += self.stop(serve, done.failure.about("sending failed: "), False, now)
            out += [Close(done.ref.link, done.failure)] if broken else []
        return out + self.finish(serve, now)

    def moving(self, news: Moving) -> list[Action]:
        """Tell consumers how far this side has got with parts that take long."""
        told: dict[Key, RankServe] = {}
        for ref, nbytes in news.parts:
            serve = self._serves.get((ref.link, ref.attempt))
            if serve is not None and serve.live and ref in serve.flight:
                serve.moving[ref], told[serve.key] = nbytes, serve
        return [Send(serve.link, serve.underway()) for serve in told.values()]

    def hashed(self, done: Hashed) -> RankServe | None:
        """Add the checksum of an announced part; return its serve."""
        serve = self._serves.get((done.ref.link, done.ref.attempt))
        if serve is None or done.ref not in serve.hashing:
            return None
        del serve.hashing[done.ref]
        serve.checksum += done.value
        return serve

    def tick(self, now: float) -> list[Action]:
        """Stop what is overdue."""
        out: list[Action] = []
        for key in self._times.due(now):
            serve = self._serves[key]
            if serve.live and now < serve.expires and serve.record.known:
                self._times.set(key, serve.expires)
            elif serve.live:
                out += self.stop(serve, *serve.overdue(now), now)
            else:  # settled or ending, and something of it still moves
                self._times.set(key, now + self._lease)
                out += serve.aborts
        self.final_replies.forget(now)
        return out

    def next(self) -> float | None:
        """Return when ``tick`` next has something to do, or ``None``."""
        due, forget = self._times.next(), self.final_replies.next()
        return due if forget is None or (due is not None and due < forget) else forget
