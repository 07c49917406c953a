"""The book of an engine's offerings, by transfer."""

from collections.abc import Iterator, Sequence

from kvxfer.identity import FIRST, Generation, RequestId, TransferId
from kvxfer.schedule.offering import Offering, OfferingState
from kvxfer.schedule.requests import EngineRequest, EngineRequests
from kvxfer.values import BlockTable, Group


class Offerings:
    """All offerings of one engine that something is remembered of."""

    def __init__(self, groups: Sequence[Group], requests: EngineRequests) -> None:
        self._groups, self.requests = tuple(groups), requests
        self._nothing = BlockTable((b"",) * len(self._groups))
        self._generation = FIRST
        self._transfers: dict[TransferId, list[Offering]] = {}  # the last one is that which consumers are served from

    def under(self, transfer: TransferId) -> Sequence[Offering]:
        """Return the offerings of this name that something is remembered of, the latest last. Any thread."""
        return self._transfers.get(transfer, ())

    def current(self, transfer: TransferId) -> Offering | None:
        """Return what is offered under this name, or was, and is held. Any thread."""
        known = self._transfers.get(transfer)
        last = known[-1] if known else None
        return last if last is not None and last.tracked else None

    def __iter__(self) -> Iterator[Offering]:
        """Yield all offerings, the oldest first. Any thread, and they may change meanwhile."""
        offerings = [one for known in self._transfers.copy().values() for one in known]
        return iter(sorted(offerings, key=lambda one: one.born))

    def offers(self, transfer: TransferId, digest: bytes) -> bool:
        """Return whether this transfer, with this digest, is offered or will be. Any thread."""
        offering = self.current(transfer)
        return offering is not None and offering.digest == digest and offering.offered

    def begun(self, transfer: TransferId, digest: bytes) -> bool:
        """Return whether some of this transfer, with this digest, is computed or being computed. Any thread."""
        offering = self.current(transfer)
        return offering is not None and offering.digest == digest and (offering.progress > 0 or offering.held)

    def differs(self, transfer: TransferId, digest: bytes) -> bool:
        """Return whether something with another digest is computed or being computed under this name. Any thread."""
        offering = self.current(transfer)
        return offering is not None and offering.digest != digest and self.begun(transfer, offering.digest)

    @property
    def transfers(self) -> tuple[TransferId, ...]:
        """The transfers of requests that are tracked or held."""
        return tuple(offering.transfer for offering in self if offering.tracked)

    def __len__(self) -> int:
        """Return how many transfers are offered, including held ones."""
        return len(self.transfers)

    def _new(
        self, request: RequestId, transfer: TransferId, digest: bytes, tokens: int, stops: bool, answer: str
    ) -> Offering:
        born = self._next_generation()
        new = Offering(request, answer, transfer, digest, tokens, 1, stops, born, born, self._nothing)
        new.answers.add(answer)
        return new

    def _leave(self, offering: Offering, request: EngineRequest) -> None:
        """Let a running request have nothing to do with an offering any more."""
        offering.sharers.pop(request.name, None)
        if offering.request == request.name:
            offering.over = True
        request.offering = None
        self.forget(offering)

    def forget(self, offering: Offering) -> None:
        """Drop the record of an offering that is closed, once nobody asks about it."""
        if offering.state is not OfferingState.CLOSED or not offering.over or offering.sharers or offering.pins:
            return
        known = self._transfers.get(offering.transfer, [])
        if offering not in known:
            return
        request = self.requests.find(offering.request)
        if request is not None and request.offering is offering:
            request.offering = None
            self.requests.forget(request)
        known.remove(offering)
        if not known:
            del self._transfers[offering.transfer]

    def _next_generation(self) -> Generation:
        self._generation = Generation(self._generation + 1)
        return self._generation
