"""Offers from their beginning to their end: leased, ended when enough readers are done, and remembered for a while."""

from __future__ import annotations

from msgspec.structs import replace

from kvxfer.failures import DELIVERED, Failure, FailureKind, Outcome
from kvxfer.identity import TransferId
from kvxfer.protocol.offer_record import OfferRecord, Over, RankServe, told
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.serves import MAX_WORDS, Serves
from kvxfer.protocol.timers import Recent, Timers
from kvxfer.protocol.transitions import ReaderEvent, ReaderState, ServeState
from kvxfer.protocol.values import Action, Emit
from kvxfer.values import Offer

S, K = ServeState, FailureKind


class LeasedOffers:
    """All offer records of one agent, and what ends them. For the arguments see ``ProducerMachine``."""

    def __init__(self, lease: float, longest: float, revocations: RevocationCounter) -> None:
        self._lease = lease
        self.records: dict[TransferId, OfferRecord] = {}
        self.over: Recent[TransferId, Over] = Recent(lease, MAX_WORDS)
        self.releases = Releases()
        self.serves = Serves(lease, longest, revocations, self._serve_over)
        self.closed: Outcome | None = None  # once the agent closes, that of all offers, present and future
        self._leases: Timers[TransferId] = Timers()

    def record(self, transfer: TransferId, now: float) -> OfferRecord:
        """Return the record of what the engine offers or revokes."""
        h = self.records.get(transfer)
        if h is None:
            h = self.records[transfer] = OfferRecord(transfer, now, now)
        if not h.known:  # a consumer may have asked for it before
            self.releases.follow(h)
        return h

    def lend(self, h: OfferRecord, now: float) -> None:
        """Keep the offer for a lease from now."""
        if h.known and h.outcome is None:
            h.leased = now + self._lease
            self._leases.set(h.transfer, h.leased)

    def settle(self, serve: RankServe, now: float) -> list[Action]:
        """Count one more reader that has everything."""
        h = serve.record
        h.readers.on(serve.reader, ReaderEvent.SETTLE)
        out = self.serves.settle(serve, now) + self.count(h, DELIVERED, now)
        self.lend(h, now)  # for its other consumers
        return out

    def count(self, h: OfferRecord, last: Outcome, now: float) -> list[Action]:
        """End the transfer here if all readers are done with it, one way or the other."""
        if h.outcome is not None or not h.done:
            return []
        if (
            last.delivered
            and h.readers.any(ReaderState.DROPPED)
            and not h.readers.enough(h.consumers, (ReaderState.DELIVERED,))
        ):
            last = Outcome(Failure(K.CANCELLED, "one of its readers dropped it"))
        return self.end(h, last, now)

    def void(self, h: OfferRecord, why: Failure, *, again: bool, now: float) -> list[Action]:
        """Void the offer and stop its serves. If ``again``, those that only wait go on waiting."""
        h.offer = None
        out: list[Action] = []
        for serve in list(h.serves.values()):
            if serve.state is S.SERVING or not again:
                out += self.serves.stop(serve, why, again, now)
        return out

    def shorten(self, h: OfferRecord, offer: Offer, why: Failure, now: float) -> list[Action]:
        """Make what has been offered so far the whole offer, for those who are being served."""
        h.short, h.offer = why, replace(offer, final=True, tokens=h.tokens, bands=0)
        out: list[Action] = []
        for serve in list(h.serves.values()):
            out += self.serves.advance(serve, now)
        return out

    def told(self, outcome: Outcome) -> Failure:
        """Return what consumers that still want a transfer with this outcome are told."""
        if outcome is self.closed and outcome.failure is not None:
            return Failure(K.PEER_LOST, outcome.failure.detail)
        return told(outcome)

    def end(self, h: OfferRecord, outcome: Outcome, now: float) -> list[Action]:
        """End the transfer, unless it has ended, and with it all its serves."""
        if h.outcome is not None:
            return []
        h.outcome, h.offer = outcome, None
        del self.records[h.transfer]
        self._leases.cancel(h.transfer)
        self.over.put(h.transfer, Over(outcome, h.next_generation), now)
        out: list[Action] = []
        if h.known:
            out.append(Emit(h.ended(outcome, now)))
        out += self.releases.of(h)
        for serve in list(h.serves.values()):
            out += self.serves.stop(serve, self.told(outcome), False, now)
        return out

    def close(self, why: Failure, now: float) -> list[Action]:
        """End every offer, present and future, with ``why``."""
        self.closed = Outcome(why)
        out: list[Action] = []
        for h in list(self.records.values()):
            out += self.end(h, self.closed, now)
        return out

    def tick(self, now: float) -> list[Action]:
        """Handle leases, and the deadlines of what is served."""
        out = self.serves.tick(now)
        for transfer in self._leases.due(now):
            out += self._expire(self.records[transfer], now)
        self.over.forget(now)
        return out

    def next(self) -> float | None:
        """Return when ``tick`` has something to do next, or ``None``."""
        due = self.serves.next(), self._leases.next(), self.over.next()
        return min([at for at in due if at is not None], default=None)

    def _expire(self, h: OfferRecord, now: float) -> list[Action]:
        """End an offer whose lease has run out, or extend the lease while a consumer is being served."""
        live = [s.expires for s in h.serves.values() if s.state not in (S.SETTLED, S.ENDED)]
        if live:
            self._leases.set(h.transfer, max(now, *live) + self._lease)
            return []
        return self.end(h, Outcome(h.unfetched(self._lease)), now)

    def _serve_over(self, h: OfferRecord, now: float) -> list[Action]:
        """Record that a serve of an offer is over; end or release what was kept only for it."""
        out = self.releases.of(h)
        if not h.known and not h.serves and h.outcome is None:
            del self.records[h.transfer]  # it was wanted but never offered
        elif h.short is not None and h.outcome is None and not h.served:
            out += self.count(h, DELIVERED, now) + self.end(h, Outcome(h.short), now)
        elif h.readers.any(ReaderState.DELIVERED):  # this may have been the last reader that the end waited for
            out += self.count(h, DELIVERED, now)
        return out


class Releases:
    """Keeps the releases of each transfer in order.

    A transfer may be offered again, in the same blocks, while something of its earlier offer still moves. So a record is
    released only after the transfer's earlier one: "nothing touches these blocks any more" must be true of all its offers.
    """

    def __init__(self) -> None:
        self._held: dict[TransferId, OfferRecord] = {}  # the newest that has ended and is not released

    def follow(self, h: OfferRecord) -> None:
        """Record a new record, which waits for the transfer's earlier one."""
        if self._held and (before := self._held.get(h.transfer)) is not None:
            h.before, before.follower = before, h

    def __contains__(self, transfer: TransferId) -> bool:
        """Return whether something of this transfer has ended and is not released."""
        return transfer in self._held

    def of(self, h: OfferRecord) -> list[Action]:
        """Return what can be released of a record, and of those that waited for it. Call it whenever less of it moves."""
        if h.outcome is None:
            return [] if h.before is not None or h.revoked is None else h.released_generation()
        if h.serves or h.before is not None:
            self._held[h.transfer] = h
            return []
        out = h.released()
        if self._held and self._held.get(h.transfer) is h:
            del self._held[h.transfer]
        if h.follower is not None:
            h.follower.before = None
            out += self.of(h.follower)
        return out
