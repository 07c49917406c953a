"""What engines tell each other about transfers through their directories: who has begun, who still waits, who declines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvxfer import clock
from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.control.notices import Answered, Declined, Unheard
from kvxfer.engine.renewals import Renewals
from kvxfer.engine.starts import AGAIN_S, Starts
from kvxfer.failures import Failure, FailureKind
from kvxfer.identity import TransferId
from kvxfer.logs import logger
from kvxfer.protocol.messages import Begun, Decline, Named, OtherContent, Renew
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.shares import IndexedExpiringMap
from kvxfer.protocol.timers import Recent
from kvxfer.schedule import Load, LoadEvent, LoadState, OfferSchedule, Schedule
from kvxfer.text import printable

log = logger("kvxfer.engine")

MAX_OVER = 100_000
"""The most ended offers that are remembered."""
MAX_EARLY, MAX_REASON_KEPT = 10_000, 200
"""The most transfers of which it is remembered that they were declined before they were offered, and characters of why."""
OTHER = (
    "the producer offers other content under the name of its transfer: another prompt, or the same for another model, adapter, salt "
    "or way of processing media"
)
"""Why a load is given up that waits for its producer."""


class Notices:
    """Sends notices to other engines' directories, and handles those that come to its own. The scheduler side's thread.

    Once this is made, the engine's own directory answers whether an offer has begun.

    Attributes:
        directory: The engine's own.
        renewals: Renews leases.
        answered: Called with answers to inquiries.
        unheard: Called with directories that cannot be reached.
    """

    def __init__(self, config: Config, directory: Directory, schedule: Schedule) -> None:
        self.directory, self._schedule = directory, schedule
        consumer = schedule.consumer
        self.renewals = Renewals(config.lease, directory.tell, lambda: consumer)
        self._renewed: list[TransferId] = []  # that the workers have not heard of yet
        self._starts = Starts(config.start, directory.tell)
        # Digests of offers whose request is over.
        self._over: Recent[TransferId, bytes] = Recent(config.lease, MAX_OVER)
        # Why consumers have declined what is not offered yet, if the router has told both engines at once.
        self._early: IndexedExpiringMap[PeerIdentity, tuple[bytes, bytes], str] = IndexedExpiringMap(
            config.lease, MAX_EARLY
        )
        self._looked = 0.0  # when what comes about once in a while was last done
        # The directory's thread must not keep alive what else this knows.
        directory.begun, directory.differs = (
            partial(_has_begun, self._over, schedule.producer),
            schedule.producer.differs,
        )
        self.answered: Callable[[Answered], None] = lambda answer: None
        self.unheard: Callable[[Unheard], None] = lambda lost: None

    # --- loads here --------------------------------------------------------------------------------------------------

    def loads(self, load: Load) -> None:
        """Renew a transfer's lease from now on, and ask whether it has begun unless that is known."""
        self.renewals.start()
        self._starts.ask((load,))

    def awaits(self, load: Load) -> bool:
        """Return whether this load waits for its producer to begin. A load that has waited too long is given up."""
        self.take_in()
        if load.state is LoadState.WAITING and self._starts.is_late(load):
            self._give_up(
                load, FailureKind.NEVER_OFFERED, f"the producer has not begun within {self._starts.patience:g} s"
            )
        return load.state is LoadState.WAITING

    def _give_up(self, load: Load, kind: FailureKind, why: str) -> None:
        """Have a request that waits for its producer computed here."""
        log.warning("request %s is computed here: %s", printable(load.request), why)
        load.failure = Failure(kind, why, str(load.transfer.source))
        self._schedule.consumer.tell(load, LoadEvent.GIVE_UP, why)

    # --- offers here -------------------------------------------------------------------------------------------------

    def offered(self, transfer: TransferId, digest: bytes) -> None:
        """Record that an offer has been made, and what consumers have said about it before that."""
        named = transfer.brief, digest
        for peer in self._early.owners(named):
            reason = self._early.get(peer, named) or ""
            self._early.pop(peer, named)
            if self._schedule.producer.offers(transfer, digest):
                self._schedule.producer.decline(transfer, reason)

    def over(self, transfer: TransferId, digest: bytes) -> None:
        """Record that an offer's request is over. Engines that asked are told that it has begun; fetching tells them the rest."""
        self._over.put(transfer, digest, clock.now())
        self.directory.begins(transfer, digest)

    # --- once a step -------------------------------------------------------------------------------------------------

    def exchange(self) -> tuple[TransferId, ...]:
        """Send other engines the notices that are due; return the offers whose consumers have said that they still wait."""
        self.take_in()
        renewed, self._renewed = tuple(self._renewed), []
        for decline in self._schedule.consumer.declines():
            named = Named(decline.transfer, decline.digest)
            self.directory.tell(decline.source, Decline(decline.source.epoch, (named,), decline.reason, decline.answer))
        now = clock.now()
        if now - self._looked >= AGAIN_S:
            self._looked = now
            self._over.forget(now)
            self._early.forget(now)
            self._starts.ask(self._schedule.consumer)
        return renewed

    def take_in(self) -> None:
        """Process the notices that have come to this engine's directory."""
        for notice in self.directory.notices():
            match notice:
                case Begun():
                    self._begun(notice)
                case OtherContent():
                    self._differs(notice)
                case Answered():
                    self.answered(notice)
                case Unheard():
                    self.unheard(notice)
                    self._unreachable(notice)
                case _:
                    self._of_offers(notice)

    def _begun(self, notice: Begun) -> None:
        consumer = self._schedule.consumer
        for named in notice.transfers:
            consumer.found(named.transfer, named.digest)
            for load in self._loads_of(named):
                consumer.tell(load, LoadEvent.BEGUN)

    def _differs(self, notice: OtherContent) -> None:
        for load in (load for named in notice.transfers for load in self._loads_of(named)):
            if load.state is LoadState.WAITING:
                self._give_up(load, FailureKind.DIGEST_DIFFERS, OTHER)

    def _unreachable(self, notice: Unheard) -> None:
        for load in self._schedule.consumer:
            loaded = load.transfer
            if (loaded.source.host, loaded.source.port) != (notice.host, notice.port):
                continue
            if loaded.name.unplaced:
                self._give_up(load, FailureKind.PEER_UNREACHABLE, "the producer's directory cannot be reached")
            else:
                self._schedule.consumer.tell(load, LoadEvent.BEGUN)

    def _of_offers(self, notice: Renew | Declined) -> None:
        producer = self._schedule.producer
        for named in notice.transfers:
            if not producer.offers(named.transfer, named.digest):
                if isinstance(notice, Declined) and self._over.get(named.transfer) != named.digest:
                    self._declined_early(notice.peer, named, notice.reason)
                continue  # over, not offered yet, or a made-up name
            if isinstance(notice, Renew):
                self._renewed.append(named.transfer)
            elif notice.answer:
                producer.decline_answer(named.transfer, notice.answer, notice.reason)
            else:
                producer.decline(named.transfer, notice.reason)

    def _loads_of(self, named: Named) -> list[Load]:
        """Return the loads of a transfer with this digest, which may go meanwhile."""
        return [one for one in self._schedule.consumer.wanting(named.transfer) if one.transfer.digest == named.digest]

    def _declined_early(self, peer: PeerIdentity, named: Named, reason: str) -> None:
        known = named.transfer.brief, named.digest
        self._early.put(peer, known, reason[:MAX_REASON_KEPT], clock.now(), peer)


def _has_begun(over: Recent[TransferId, bytes], producer: OfferSchedule, transfer: TransferId, digest: bytes) -> bool:
    """Return whether an offer of this engine has begun, or is over and none follows it. Any thread."""
    ended = over.get(transfer) == digest and not producer.offers(transfer, digest)
    return ended or producer.begun(transfer, digest)
