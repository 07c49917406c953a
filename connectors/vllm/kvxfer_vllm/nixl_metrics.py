"""Metrics with the names and units of vLLM's NixlConnector, for dashboards that read these.

Not all of them: kvxfer counts neither the descriptors of a transfer nor the time for posting them. Two count what cannot happen here,
and stay at 0: kvxfer sends no notifications, and a load whose offer has ended fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.failures import FailureKind
from kvxfer_vllm.enclosing import together

__all__ = ["NixlNamedMetrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
BYTES = tuple(2 ** (10 + i) for i in range(1, 25, 2))
"""NixlConnector's buckets, so that quantiles are comparable."""

_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

NO_FAILURES = ("delivered", FailureKind.CANCELLED)


class NixlNamedMetrics:
    """Histograms and counters under the names of NixlConnector's.

    Args:
        make: ``make(kind, name, documentation, buckets=)`` registers one; ``kind`` is ``"counter"`` or ``"histogram"``.
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._seconds = make(
            "histogram",
            "vllm:nixl_xfer_time_seconds",
            "By kvxfer: from the producer's first word that KV is ready to the outcome, of loads that were delivered.",
            buckets=SECONDS,
        )
        self._bytes = make(
            "histogram",
            "vllm:nixl_bytes_transferred",
            "By kvxfer: bytes of each load that was delivered.",
            buckets=BYTES,
        )
        self._failed = make(
            "counter",
            "vllm:nixl_num_failed_transfers",
            "By kvxfer: loads that failed, whatever the reason, links that could not be made included.",
        )
        self._expired = make(
            "counter",
            "vllm:nixl_num_kv_expired_reqs",
            "By kvxfer: offers whose lease has ended; counted at the producer.",
        )
        never = (
            ("vllm:nixl_num_failed_notifications", "By kvxfer: always 0, because it sends no notifications."),
            ("vllm:nixl_num_notifications_after_expiry", "By kvxfer: always 0, because what comes too late fails."),
        )
        zeros = [make("counter", *one) for one in never]
        self._all = self._seconds, self._bytes, self._failed, self._expired, *zeros

    @classmethod
    def of(cls, vllm_config: Any, make: Callable[..., Any]) -> NixlNamedMetrics | None:
        """Create the metrics; return ``None`` beside NIXL's own connector, which uses the same names."""
        beside = [kind for connector in together(vllm_config) for kind in connector.__mro__]
        return None if any(kind.__module__.startswith(_NIXL) for kind in beside) else cls(make)

    def begin(self, values: list[Any]) -> None:
        """Start an engine's series at 0."""
        for metric in self._all:
            metric.labels(*values)

    def observe(self, values: list[Any], data: dict[str, Any]) -> None:
        """Add what the ranks have counted (see ``KVXferStats``)."""
        for outcome, nbytes, seconds, waited in data["loads"]:
            if outcome == "delivered":
                self._seconds.labels(*values).observe(seconds - waited)
                self._bytes.labels(*values).observe(nbytes)
            elif outcome not in NO_FAILURES:
                self._failed.labels(*values).inc()
        self._expired.labels(*values).inc(data["offers"].get(FailureKind.UNFETCHED, 0))
