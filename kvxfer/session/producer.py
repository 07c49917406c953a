"""The producer's half of a session as a sans-IO state machine: events in, actions out, the clock an argument.

A *holding* is one transfer as this rank knows it: what the engine offered, and one *serve* for each consumer rank
that wants it. Want and offer meet here, whichever comes first. Blocks are leased: a holding that nobody wants ends
when its lease does, and while a consumer is being served its lease is renewed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvxfer.errors import PeerError
from kvxfer.geometry import PlanError
from kvxfer.identity import TransferId
from kvxfer.session import messages as m
from kvxfer.session.parts import Table, aligned, piece_bytes, plan_part
from kvxfer.session.values import (
    Abort,
    Action,
    Ended,
    Kind,
    LinkId,
    LinkInfo,
    Move,
    Moved,
    Outcome,
    PartRef,
    Released,
    Report,
    Send,
)
from kvxfer.transport import Verb

__all__ = ["TRANSITIONS", "Offered", "Producer", "State", "Stimulus"]


class State(enum.StrEnum):
    WAITING = "waiting"  # wanted, nothing announced yet
    SERVING = "serving"  # at least one part announced
    SETTLED = "settled"  # the consumer has checked and was told yes
    ENDING = "ending"  # over; waiting for our own part batches to end before saying Gone
    ENDED = "ended"


class Stimulus(enum.StrEnum):
    ANNOUNCE = "part announced"
    VERDICT_OK = "check: held"
    VERDICT_NO = "check: not held"
    DROP = "drop, revoke, expiry or error"
    QUIET = "own parts ended"
    LINK_DOWN = "link down"


S, E = State, Stimulus
TRANSITIONS: dict[tuple[State, Stimulus], State] = {
    (S.WAITING, E.ANNOUNCE): S.SERVING,
    (S.SERVING, E.ANNOUNCE): S.SERVING,
    (S.SERVING, E.VERDICT_OK): S.SETTLED,
    (S.SERVING, E.VERDICT_NO): S.ENDING,
    (S.WAITING, E.DROP): S.ENDING,
    (S.SERVING, E.DROP): S.ENDING,
    (S.ENDING, E.QUIET): S.ENDED,
    (S.WAITING, E.LINK_DOWN): S.ENDED,
    (S.SERVING, E.LINK_DOWN): S.ENDED,
    (S.ENDING, E.LINK_DOWN): S.ENDED,
}
"""Every pair that is not listed leaves the state alone."""


@dataclass(frozen=True)
class Offered:
    """What the engine offers: the KV of tokens ``[0, tokens)`` in ``blocks`` (int64 tables per group). ``final``: nothing
    more will follow in this generation."""

    transfer: TransferId
    digest: bytes
    generation: int
    tokens: int
    blocks: Table
    final: bool


@dataclass
class _Serve:
    want: m.Want
    blocks: Table
    state: State = State.WAITING
    sent: int = 0  # tokens announced so far
    part: int = 0
    final: bool = False
    generation: int = -1
    again: bool = False  # what Gone will say
    reason: str = ""
    unsent: dict[PartRef, m.Have] = field(default_factory=dict)  # write: told when the bytes are there

    def on(self, stimulus: Stimulus) -> bool:
        after = TRANSITIONS.get((self.state, stimulus))
        if after is None:
            return False
        self.state = after
        return True


@dataclass
class _Holding:
    transfer: TransferId
    began: float
    expires: float
    offer: Offered | None = None
    dead_generation: int = -1  # this and older ones are revoked
    serves: dict[LinkId, _Serve] = field(default_factory=dict)
    flight: set[PartRef] = field(default_factory=set)
    settled: set[LinkId] = field(default_factory=set)
    dropped: set[LinkId] = field(default_factory=set)
    readers: int = 1
    nbytes: int = 0
    outcome: Outcome | None = None
    offered: bool = False  # the engine knows this holding and waits for its end


class Producer:
    """All holdings of one agent. Not thread-safe; every method returns the actions it asks for.

    ``lease``: seconds for which an offer, or a want without one, is kept with nobody asking after it.
    """

    def __init__(self, lease: float) -> None:
        self._lease = lease
        self._holdings: dict[TransferId, _Holding] = {}
        self._links: dict[LinkId, LinkInfo] = {}
        self._streams: dict[LinkId, int] = {}
        # What was said of transfers that are over, kept for one lease so that a repeated question gets its answer.
        self._verdicts: dict[tuple[LinkId, TransferId, int], tuple[float, m.Verdict]] = {}
        self._over: dict[TransferId, tuple[float, str]] = {}

    # --- from the engine -------------------------------------------------------------------------------------------

    def offer(self, offer: Offered, now: float) -> list[Action]:
        """Offer blocks, or more of them. An offer of a generation that was revoked is ignored."""
        self._over.pop(offer.transfer, None)
        h = self._holding(offer.transfer, now)
        if h.outcome is not None or offer.generation <= h.dead_generation:
            return []
        h.offered = True
        h.expires = max(h.expires, now + self._lease)
        out: list[Action] = []
        if h.offer is not None and offer.generation > h.offer.generation:
            out += self._void(h, h.offer.generation, "the producer computed it anew", again=True, now=now)
        h.offer = offer
        for link in list(h.serves):
            out += self._advance(h, link, now)
        return out

    def revoke(
        self, transfer: TransferId, generation: int, reason: str, gone: bool, now: float, offered: bool = False
    ) -> list[Action]:
        """The blocks of this generation (and older) are given up. ``gone``: nothing will replace them. ``offered``: the
        engine made an offer that has not reached us, and waits for its end."""
        h = self._holdings.get(transfer)
        if h is None:
            if not gone:
                return []
            h = self._holding(transfer, now)
        h.offered |= offered
        h.dead_generation = max(h.dead_generation, generation)
        out = self._void(h, generation, reason, again=not gone, now=now)
        return out + (self._end(h, Outcome(Kind.CANCELLED, reason), now) if gone else [])

    def renew(self, transfer: TransferId, now: float) -> None:
        """Somebody still means to fetch it."""
        h = self._holdings.get(transfer)
        if h is not None:
            h.expires = max(h.expires, now + self._lease)

    # --- from the shell --------------------------------------------------------------------------------------------

    def link_up(self, link: LinkId, info: LinkInfo, now: float) -> list[Action]:
        """A consumer rank has said hello; a second hello on one link ends what the first had begun."""
        out = self._forget_link(link, now)
        self._links[link], self._streams[link] = info, 0
        return out

    def link_down(self, link: LinkId, reason: str, now: float) -> list[Action]:
        """The consumer rank is lost. What it was being served ends; the offer stays until its lease does."""
        self._links.pop(link, None)
        return self._forget_link(link, now)

    def message(self, link: LinkId, msg: m.Message, now: float) -> list[Action]:
        """A message from a consumer rank. Anything late, repeated or unknown changes nothing."""
        match msg:
            case m.Want():
                return self._want(link, msg, now)
            case m.Check():
                return self._check(link, msg, now)
            case m.Drop():
                return self._drop(link, msg, now)
            case _:
                return []

    def moved(self, done: Moved, now: float) -> list[Action]:
        """One of our own part batches has ended."""
        h = self._holdings.get(done.ref.transfer)
        if h is None or done.ref not in h.flight:
            return []
        if done.quiet:
            h.flight.discard(done.ref)
        serve = h.serves.get(done.ref.link)
        out: list[Action] = []
        if serve is not None and serve.want.attempt == done.ref.attempt:
            have = serve.unsent.pop(done.ref, None)
            if done.error is None:
                h.nbytes += done.nbytes
                if have is not None and serve.state is S.SERVING:
                    out.append(Send(done.ref.link, have))
            elif serve.state is S.SERVING:
                out += self._stop(h, done.ref.link, serve, f"sending failed: {done.error}", done.collateral)
            out += self._quiet(h, done.ref.link, serve)
        elif serve is not None:
            out += self._advance(h, done.ref.link, now)
        return out + self._release(h)

    def tick(self, now: float) -> list[Action]:
        """Leases. Call when ``next_tick`` is due."""
        out: list[Action] = []
        for h in list(self._holdings.values()):
            if any(s.state is S.SERVING for s in h.serves.values()):
                h.expires = max(h.expires, now + self._lease)
            if h.outcome is None and now >= h.expires:
                what = "was not fetched" if h.offered else "was wanted but never offered"
                out += self._void(h, 1 << 62, f"it {what} within its lease", again=False, now=now)
                out += self._end(h, Outcome(Kind.FAILED, f"{what} within the lease of {self._lease:g} s"), now)
        self._verdicts = {k: v for k, v in self._verdicts.items() if v[0] > now}
        self._over = {k: v for k, v in self._over.items() if v[0] > now}
        return out

    def next_tick(self) -> float | None:
        """When ``tick`` has something to do next, or ``None``."""
        times = [h.expires for h in self._holdings.values() if h.outcome is None]
        times += [at for at, _ in self._over.values()]
        return min(times, default=None)

    @property
    def busy_links(self) -> set[LinkId]:
        """Links on which a consumer is being served: those whose silence matters."""
        live = (S.WAITING, S.SERVING, S.ENDING)
        return {link for h in self._holdings.values() for link, s in h.serves.items() if s.state in live}

    def __len__(self) -> int:
        return len(self._holdings)

    # --- inside ----------------------------------------------------------------------------------------------------

    def _holding(self, transfer: TransferId, now: float) -> _Holding:
        h = self._holdings.get(transfer)
        if h is None:
            h = self._holdings[transfer] = _Holding(transfer, now, now + self._lease)
        return h

    def _want(self, link: LinkId, want: m.Want, now: float) -> list[Action]:
        if link not in self._links:
            return []
        if want.transfer in self._over:
            return [Send(link, m.Gone(want.transfer, want.attempt, self._over[want.transfer][1], False))]
        h = self._holding(want.transfer, now)
        if h.outcome is not None:
            return [Send(link, m.Gone(want.transfer, want.attempt, _words(h.outcome), False))]
        old = h.serves.get(link)
        if old is not None and want.attempt <= old.want.attempt:
            return []  # repeated, or of an attempt that a newer one has replaced
        try:
            blocks: Table = tuple(m.unpack_blocks(b) for b in want.blocks)
        except PeerError as e:
            return [Send(link, m.Gone(want.transfer, want.attempt, str(e), False))]
        out: list[Action] = []
        if old is not None:
            out += [Abort(ref) for ref in h.flight if ref.link == link]
        h.dropped.discard(link)
        h.readers = max(h.readers, want.readers)
        h.serves[link] = _Serve(want, blocks, sent=want.start)
        return out + self._advance(h, link, now)

    def _advance(self, h: _Holding, link: LinkId, now: float) -> list[Action]:
        """Announce to one consumer what has become ready for it."""
        serve, offer, info = h.serves[link], h.offer, self._links.get(link)
        if offer is None or info is None or serve.state not in (S.WAITING, S.SERVING) or serve.final:
            return []
        if any(r.link == link and r.attempt != serve.want.attempt for r in h.flight):
            return []  # an older attempt's batches must end first
        want = serve.want
        if offer.digest != want.digest:
            return self._stop(h, link, serve, "the digests differ: it is not the KV of the consumer's prompt", False)
        if offer.final and offer.tokens < want.tokens:
            what = f"the producer holds {offer.tokens} tokens, the consumer wants {want.tokens}"
            return self._stop(h, link, serve, what, False)
        hi = min(want.tokens, offer.tokens if offer.final else aligned(info.planner.src, offer.tokens))
        if hi <= serve.sent and not offer.final:
            return []
        if any(g.kind == "state" for g in info.planner.src.groups) and offer.final and offer.tokens != want.tokens:
            what = f"its state is that after token {offer.tokens}, the consumer wants {want.tokens}"
            return self._stop(h, link, serve, what, False)
        try:
            plan = plan_part(
                info.planner, offer.blocks, serve.blocks, want.start, want.tokens, serve.sent, hi, offer.final
            )
        except PlanError as e:
            return self._stop(h, link, serve, f"the block tables do not join: {e}", False)
        serve.on(E.ANNOUNCE)
        ref = PartRef("producer", link, want.transfer, want.attempt, serve.part)
        have = m.Have(
            want.transfer, want.attempt, offer.generation, serve.part, serve.sent, max(hi, serve.sent), offer.final,
            tuple(m.pack_blocks(b) for b in offer.blocks), self._streams[link], piece_bytes(plan, info),
        )  # fmt: skip
        serve.part, serve.sent, serve.final = serve.part + 1, max(hi, serve.sent), offer.final
        serve.generation = offer.generation
        self._streams[link] += 1
        out: list[Action] = []
        if info.mode == "write":
            h.flight.add(ref)
            serve.unsent[ref] = have
            return [Move(ref, Verb.WRITE, plan, have.stream, have.piece_bytes)]
        if info.mode == "sendrecv" or have.piece_bytes:  # a staged read needs us to pack
            verb = Verb.SEND if info.mode == "sendrecv" else Verb.READ
            h.flight.add(ref)
            out.append(Move(ref, verb, plan, have.stream, have.piece_bytes))
        else:
            h.nbytes += plan.nbytes
        return [Send(link, have), *out]

    def _check(self, link: LinkId, msg: m.Check, now: float) -> list[Action]:
        key = (link, msg.transfer, msg.attempt)
        if key in self._verdicts:
            return [Send(link, self._verdicts[key][1])]
        h = self._holdings.get(msg.transfer)
        serve = h.serves.get(link) if h is not None else None
        if h is None or serve is None or serve.want.attempt != msg.attempt:
            return [Send(link, m.Verdict(msg.transfer, msg.attempt, False, "the producer does not hold it any more"))]
        held = h.offer is not None and h.offer.generation == msg.generation == serve.generation and serve.final
        if not held:
            verdict = m.Verdict(msg.transfer, msg.attempt, False, "the producer's blocks changed meanwhile")
            return [Send(link, verdict), *self._stop(h, link, serve, verdict.reason, False)]
        if not serve.on(E.VERDICT_OK):
            return []
        verdict = m.Verdict(msg.transfer, msg.attempt, True, "")
        self._verdicts[key] = (now + self._lease, verdict)
        h.settled.add(link)
        return [Send(link, verdict), *self._count(h, now)]

    def _drop(self, link: LinkId, msg: m.Drop, now: float) -> list[Action]:
        h = self._holdings.get(msg.transfer)
        serve = h.serves.get(link) if h is not None else None
        if h is None or serve is None or serve.want.attempt != msg.attempt:
            return [Send(link, m.Gone(msg.transfer, msg.attempt, "nothing of it is being served", False))]
        if serve.state is S.ENDED:
            return [Send(link, m.Gone(msg.transfer, msg.attempt, serve.reason, False))]
        h.dropped.add(link)
        out = self._stop(h, link, serve, f"the consumer dropped it: {msg.reason}", False)
        return out + self._count(h, now)

    def _count(self, h: _Holding, now: float) -> list[Action]:
        """All readers are done with it, one way or the other: that is the transfer's end here."""
        if len(h.settled | h.dropped) < h.readers:
            return []
        if h.dropped - h.settled:
            reason = next((h.serves[k].reason for k in h.dropped if k in h.serves), "")
            return self._end(h, Outcome(Kind.CANCELLED, reason or "the consumer dropped it"), now)
        return self._end(h, Outcome(Kind.DELIVERED), now)

    def _void(self, h: _Holding, generation: int, reason: str, *, again: bool, now: float) -> list[Action]:
        """The offer up to this generation is void: stop all that serve it; those that only wait may go on."""
        if h.offer is not None and h.offer.generation <= generation:
            h.offer = None
        out: list[Action] = []
        for link, serve in list(h.serves.items()):
            if serve.state is S.SERVING or (serve.state is S.WAITING and not again):
                out += self._stop(h, link, serve, reason, again)
        return out

    def _stop(self, h: _Holding, link: LinkId, serve: _Serve, reason: str, again: bool) -> list[Action]:
        """End one serve: abort what moves, and say Gone once nothing of ours moves any more."""
        serve.reason, serve.again = reason, again
        if not serve.on(E.DROP):
            return []
        serve.unsent.clear()
        aborts: list[Action] = [Abort(ref) for ref in h.flight if ref.link == link]
        return aborts + self._quiet(h, link, serve)

    def _quiet(self, h: _Holding, link: LinkId, serve: _Serve) -> list[Action]:
        if serve.state is not S.ENDING or any(r.link == link for r in h.flight):
            return []
        serve.on(E.QUIET)
        if h.serves.get(link) is serve and serve.again:
            del h.serves[link]
        return [Send(link, m.Gone(serve.want.transfer, serve.want.attempt, serve.reason, serve.again))]

    def _forget_link(self, link: LinkId, now: float) -> list[Action]:
        out: list[Action] = []
        for h in list(self._holdings.values()):
            serve = h.serves.pop(link, None)
            if serve is not None:
                serve.on(E.LINK_DOWN)
                out += [Abort(ref) for ref in h.flight if ref.link == link]
                h.expires = max(h.expires, now + self._lease)
        return out

    def _end(self, h: _Holding, outcome: Outcome, now: float) -> list[Action]:
        if h.outcome is not None:
            return []
        h.outcome = outcome
        out: list[Action] = []
        for link, serve in list(h.serves.items()):
            out += self._stop(h, link, serve, _words(outcome), False)
        self._over[h.transfer] = (now + self._lease, _words(outcome))
        if h.offered:
            name = str(h.transfer)
            out.append(Report(Ended("producer", h.transfer, name, outcome, h.nbytes, now - h.began)))
        return out + self._release(h)

    def _release(self, h: _Holding) -> list[Action]:
        if h.outcome is None or h.flight or self._holdings.get(h.transfer) is not h:
            return []
        del self._holdings[h.transfer]
        return [Report(Released("producer", h.transfer, str(h.transfer)))] if h.offered else []


def _words(outcome: Outcome) -> str:
    return outcome.reason or "all its readers have fetched it"
