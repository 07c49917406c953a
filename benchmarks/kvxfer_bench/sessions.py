"""Fetches between the two agents of a pair, for benchmarks that take turns."""

from __future__ import annotations

from kvxfer_bench.transfer.pair import Pair
from kvxfer_bench.transfer.shapes import Request

__all__ = ["Sessions"]


class Sessions:
    """Fetches between the two agents of a pair, one after the other."""

    def __init__(self, both: Pair, request: Request) -> None:
        self._both, self._request = both, request
        self._source = both.producer("open_agent", "off")
        both.consumer("open_agent", "off")

    def fetch(self, number: int) -> float:
        """Offer and fetch; return the seconds from the producer's announcement to the outcome."""
        self._both.producer("offer", [number], self._request.src)
        [row] = self._both.consumer("fetch", [number], self._request.dst, {"off": self._source}, 0.0)
        return float(row["off"]["session_s"])

    def expect(self, what: str) -> None:
        """Check what the fetches have brought; see ``Pair.expect``."""
        self._both.expect(self._request.dst, self._request.src, what)
