"""Count requests that load KV, each once whatever the number of ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvxfer.failures import FailureKind as K
from kvxfer_vllm.stats import CANCELLED, COMPUTED, DELIVERED, KVXferStats
from kvxfer_vllm.tracing import LOAD, RequestSpans
from kvxfer_vllm.used import UsedOffers

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["LoadingRequests"]

GONE = {
    *(DELIVERED, COMPUTED, CANCELLED),
    *map(str, (K.NEVER_OFFERED, K.WITHDRAWN, K.DIGEST_DIFFERS, K.NO_SUCH_ENGINE)),
}
"""The outcomes after which the producer does not offer it any more."""


class LoadingRequests:
    """From a request's arrival until it is known what becomes of its load; one thread.

    Attributes:
        used: The offers that such requests have had.
    """

    def __init__(self, spans: RequestSpans) -> None:
        self._spans = spans
        self._since: dict[str, tuple[float, bytes | None]] = {}
        self._stats = KVXferStats()
        self.used = UsedOffers()

    def arrived(self, request: Request, transfer: str, key: bytes | None) -> None:
        """Record that a request has come whose KV is to be loaded, and the key of the offer that this takes, if it has one."""
        self._since[request.request_id] = time.monotonic(), key
        self._spans.begin(LOAD, request, transfer)

    def ended(self, request: str, outcome: str) -> None:
        """Process what has become of its load; the first word of a request counts, and what follows changes nothing."""
        if request not in self._since:
            return
        since, key = self._since.pop(request)
        self._stats.request(outcome, time.monotonic() - since)
        self._spans.end(LOAD, request, outcome)
        if key is not None and outcome in GONE:
            self.used.add(key)

    def not_offered(self, reason: str) -> None:
        """Record that a request was to be offered to other engines, and is not, and why."""
        self._stats.not_offered(reason)

    def stats(self) -> KVXferStats | None:
        """Return what there is to tell since the last call, if anything."""
        if self._stats.is_empty():
            return None
        out, self._stats = self._stats, KVXferStats()
        return out

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._since)
