"""Count requests that load KV, each once whatever the number of ranks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvxfer_vllm.stats import KVXferStats
from kvxfer_vllm.tracing import LOAD, RequestSpans

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["LoadingRequests"]


class LoadingRequests:
    """From a request's arrival until it is known what becomes of its load; one thread."""

    def __init__(self, spans: RequestSpans) -> None:
        self._spans = spans
        self._since: dict[str, float] = {}
        self._stats = KVXferStats()

    def arrived(self, request: Request, transfer: str) -> None:
        """Record that a request has come whose KV is to be loaded."""
        self._since[request.request_id] = time.monotonic()
        self._spans.begin(LOAD, request, transfer)

    def ended(self, request: str, outcome: str) -> None:
        """Process what has become of its load; the first word of a request counts, and what follows changes nothing."""
        since = self._since.pop(request, None)
        if since is not None:
            self._stats.request(outcome, time.monotonic() - since)
            self._spans.end(LOAD, request, outcome)

    def stats(self) -> KVXferStats | None:
        """Return what there is to tell since the last call, if anything."""
        if self._stats.is_empty():
            return None
        out, self._stats = self._stats, KVXferStats()
        return out

    def __len__(self) -> int:
        """Return how many are remembered."""
        return len(self._since)
