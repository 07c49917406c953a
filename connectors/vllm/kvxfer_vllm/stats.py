"""Transfers as vLLM logs and exports them. Metrics: docs/metrics.md."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.session import Ended

__all__ = ["KVXferPromMetrics", "KVXferStats"]

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class KVXferStats(KVConnectorStats):
    """``data["loads"]``: one ``[outcome, bytes, seconds]`` for each load that has ended on a rank."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {"loads": []})

    def record(self, event: Ended) -> None:
        self.data["loads"].append([str(event.outcome.kind), event.nbytes, event.seconds])

    def reset(self) -> None:
        self.data = {"loads": []}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        self.data["loads"] += other.data["loads"]
        return self

    def is_empty(self) -> bool:
        return not self.data["loads"]

    def reduce(self) -> dict[str, int | float]:
        loads = self.data["loads"]
        good = [x for x in loads if x[0] == "delivered"]
        seconds = sum(x[2] for x in good)
        return {
            "loads": len(loads),
            "not delivered": len(loads) - len(good),
            "MB": round(sum(x[1] for x in good) / 1e6, 3),
            "mean ms": round(1e3 * seconds / max(len(good), 1), 3),
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
            name="kvxfer_transfer_seconds", documentation="From want to outcome, of loads that were delivered.",
            buckets=BUCKETS, labelnames=labelnames,
        )  # fmt: skip
        self._loads = self._counter_cls(
            name="kvxfer_transfers", documentation="Loads that have ended, by outcome.",
            labelnames=[*labelnames, "outcome"],
        )  # fmt: skip
        for values in per_engine_labelvalues.values():
            self._bytes.labels(*values)
            self._seconds.labels(*values)
            for outcome in ("delivered", "failed", "cancelled"):
                self._loads.labels(*values, outcome)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for outcome, nbytes, seconds in transfer_stats_data["loads"]:
            self._loads.labels(*values, outcome).inc()
            if outcome == "delivered":
                self._bytes.labels(*values).inc(nbytes)
                self._seconds.labels(*values).observe(seconds)


