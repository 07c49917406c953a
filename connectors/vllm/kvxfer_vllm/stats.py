"""Transfers as vLLM logs and exports them. Metrics: docs/metrics.md."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.failures import FailureKind
from kvxfer.protocol.values import Ended, Stats

__all__ = ["KVXferPromMetrics", "KVXferStats"]

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

DELIVERED = "delivered"

COUNTS = ("corrupt", "direct", "staged")
"""What of an agent's stats only ever grows."""


class KVXferStats(KVConnectorStats):
    """``data["loads"]``: one ``[outcome, bytes, seconds]`` for each load that has ended on a rank.

    Its outcome is ``delivered`` or the kind of its failure. ``data["counts"]``: by how much the agents' counts have
    grown. ``data["quarantined"]``: bytes, of the ranks where they have changed.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not data:
            self.reset()

    def record(self, event: Ended) -> None:
        """Return a load has ended."""
        self.data["loads"].append([str(event.outcome.kind or DELIVERED), event.nbytes, event.seconds])

    def note(self, rank: str, before: Stats | None, now: Stats) -> None:
        """Return a rank's agent says this now, and said that before."""
        for name in COUNTS:
            self._count(name, getattr(now, name) - (getattr(before, name) if before else 0))
        if now.quarantined_bytes != (before.quarantined_bytes if before else 0):
            self.data["quarantined"][rank] = now.quarantined_bytes

    def _count(self, name: str, n: int) -> None:
        if n:
            self.data["counts"][name] = self.data["counts"].get(name, 0) + n

    def reset(self) -> None:
        self.data = {"loads": [], "counts": {}, "quarantined": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["loads"] += other.data["loads"]
        for name, n in other.data["counts"].items():
            self._count(name, n)
        self.data["quarantined"] |= other.data["quarantined"]
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        loads, counts = self.data["loads"], self.data["counts"]
        good = [x for x in loads if x[0] == DELIVERED]
        seconds = sum(x[2] for x in good)
        return {
            "loads": len(loads),
            "not delivered": len(loads) - len(good),
            "MB": round(sum(x[1] for x in good) / 1e6, 3),
            "mean ms": round(1e3 * seconds / max(len(good), 1), 3),
            "parts direct": counts.get("direct", 0),
            "parts staged": counts.get("staged", 0),
            "corrupt": counts.get("corrupt", 0),
        }


class KVXferPromMetrics(KVConnectorPromMetrics):
    """Counters and a histogram in vLLM's own registry, with vLLM's labels."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._bytes = self._counter_cls(
            name="kvxfer_kv_bytes", documentation="Bytes of KV cache that arrived.", labelnames=labelnames
        )
        self._seconds = self._histogram_cls(
            name="kvxfer_transfer_seconds",
            documentation="From want to outcome, of loads that were delivered.",
            buckets=BUCKETS,
            labelnames=labelnames,
        )
        self._loads = self._counter_cls(
            name="kvxfer_transfers",
            documentation="Loads that have ended: delivered, or by the kind of their failure.",
            labelnames=[*labelnames, "outcome"],
        )
        self._parts = self._counter_cls(
            name="kvxfer_parts",
            documentation="Parts of transfers moved by this side, direct or staged.",
            labelnames=[*labelnames, "way"],
        )
        self._corrupt = self._counter_cls(
            name="kvxfer_corrupt",
            documentation="Transfers whose checksum was not that of what was sent.",
            labelnames=labelnames,
        )
        self._quarantined = self._gauge_cls(
            name="kvxfer_quarantined_bytes",
            documentation="Of ended transfers, which the back end may still touch.",
            labelnames=labelnames,
        )
        self._by_rank: dict[int, dict[str, int]] = {}
        for values in per_engine_labelvalues.values():
            self._corrupt.labels(*values)
            self._quarantined.labels(*values)
            for way in ("direct", "staged"):
                self._parts.labels(*values, way)
            self._bytes.labels(*values)
            self._seconds.labels(*values)
            for outcome in (DELIVERED, *FailureKind):
                self._loads.labels(*values, str(outcome))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for outcome, nbytes, seconds in transfer_stats_data["loads"]:
            self._loads.labels(*values, outcome).inc()
            if outcome == DELIVERED:
                self._bytes.labels(*values).inc(nbytes)
                self._seconds.labels(*values).observe(seconds)
        counts = transfer_stats_data["counts"]
        self._corrupt.labels(*values).inc(counts.get("corrupt", 0))
        for way in ("direct", "staged"):
            self._parts.labels(*values, way).inc(counts.get(way, 0))
        by_rank = self._by_rank.setdefault(engine_idx, {})
        by_rank |= transfer_stats_data["quarantined"]
        self._quarantined.labels(*values).set(sum(by_rank.values()))
