"""The metrics that vLLM exports of kvxfer, in vLLM's own registry and with its labels. ``docs/metrics.md`` lists them.

Some have the names and units of vLLM's NixlConnector, for dashboards that read these. Not all of them: kvxfer counts neither the
descriptors of a transfer nor the time for posting them. Two count what cannot happen here, and stay at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from kvxfer.failures import FailureKind
from kvxfer_vllm.internals import together
from kvxfer_vllm.stats import COMPUTED, DELIVERED, ELSEWHERE, Reason

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
NIXL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
NIXL_BYTES = tuple(2 ** (10 + i) for i in range(1, 25, 2))
"""NixlConnector's buckets, so that quantiles are comparable."""
MAX_PEERS, OTHERS = 64, "others"
"""The most hosts that failed loads are counted for, one by one; the others are counted together, under this name."""
ASKED = {"requests": "asked", "unanswered": "unanswered"}
TOKENS = ("found", "loaded", "refused", "recomputed")
"""Fields of ``AskCounts``: those that count requests, and how they are called here; those that count tokens."""
KINDS = ("nixl", "remote_kv_source", "kv_hint", "kvxfer_sources")
"""What names sources; see ``said.hints_of``."""
NIXL = "vllm:nixl_"


class Metric(NamedTuple):
    """One metric; ``shown``: values of its ``labels`` that are shown from the start."""

    kind: str
    documentation: str
    labels: tuple[str, ...] = ()
    shown: tuple[tuple[str, ...], ...] = ((),)
    buckets: tuple[float, ...] = ()


def _each(*values: Any) -> tuple[tuple[str, ...], ...]:
    return tuple((str(value),) for value in values)


METRICS = {
    "kvxfer_kv_bytes": Metric("counter", "Bytes of KV cache that arrived."),
    "kvxfer_wasted_bytes": Metric("counter", "Bytes of KV cache that arrived for loads that then failed."),
    "kvxfer_failures": Metric(
        "counter", "Loads that have failed, by kind of failure and by the peer's host.", ("outcome", "peer"), ()
    ),
    "kvxfer_transfer_seconds": Metric(
        "histogram", "Time from the load's start to its end, for loads that were delivered.", buckets=BUCKETS
    ),
    "kvxfer_transfers": Metric(
        "counter",
        "Loads that have ended, by outcome: delivered, or the kind of failure.",
        ("outcome",),
        _each(DELIVERED, *FailureKind),
    ),
    "kvxfer_requests": Metric(
        "counter",
        "Requests whose load has ended on all ranks, by outcome: delivered, computed here, loaded elsewhere, or the kind of failure.",
        ("outcome",),
        _each(DELIVERED, COMPUTED, ELSEWHERE, *FailureKind),
    ),
    "kvxfer_request_seconds": Metric(
        "histogram",
        "Time from a request's arrival to the end of its load, for requests whose load was delivered.",
        buckets=BUCKETS,
    ),
    "kvxfer_offers": Metric(
        "counter",
        "Offers that have ended, by outcome: delivered, or the kind of failure.",
        ("outcome",),
        _each(DELIVERED, *FailureKind),
    ),
    "kvxfer_unclaimed_offers": Metric(
        "counter", "Offers whose lease has ended and for which no engine had ever asked."
    ),
    "kvxfer_not_offered": Metric(
        "counter",
        "Requests that were to be offered to other engines and are not, by reason.",
        ("reason",),
        _each(*Reason),
    ),
    "kvxfer_not_loaded": Metric(
        "counter",
        "Requests that were to load from another engine and are computed here, by reason.",
        ("reason",),
        _each(Reason.PARAMS, Reason.STATE),
    ),
    "kvxfer_parts": Metric(
        "counter", "Parts of transfers moved by this side, direct or staged.", ("way",), _each("direct", "staged")
    ),
    "kvxfer_corrupt": Metric("counter", "Transfers whose bytes have another checksum than the bytes that were sent."),
    "kvxfer_quarantined_bytes": Metric("gauge", "Bytes of ended transfers that the back end may still touch."),
    "kvxfer_loads_in_hand": Metric("gauge", "Loads that are under way, over all ranks."),
    "kvxfer_offers_in_hand": Metric("gauge", "Offers that are leased or being read, over all ranks."),
    "kvxfer_links": Metric("gauge", "Links that are up, over all ranks.", ("role", "backend"), ()),
    "kvxfer_link_bytes_per_second": Metric(
        "gauge", "How fast KV has moved recently over the slowest link with a host.", ("peer", "backend"), ()
    ),
    "kvxfer_prefix_requests": Metric(
        "counter",
        "Requests for which other engines were asked for a prefix, and those to which none has answered in time, by what named these "
        "engines.",
        ("outcome", "source"),
        tuple(product(ASKED.values(), KINDS)),
    ),
    "kvxfer_prefix_tokens": Metric(
        "counter",
        "Tokens that other engines held of prompts of this engine: found beyond what was cached here, and of these loaded, refused "
        "because no load would have ended sooner, or recomputed because the load failed.",
        ("outcome", "source"),
        tuple(product(TOKENS, KINDS)),
    ),
    "kvxfer_inquiries": Metric(
        "counter",
        "Questions of other engines for a prefix, by answer: held, nothing, or refused for want of room.",
        ("answer",),
        _each("held", "nothing", "refused"),
    ),
    "kvxfer_inquired_tokens": Metric("counter", "Tokens that were offered in answer to such questions."),
    f"{NIXL}xfer_time_seconds": Metric(
        "histogram",
        "By kvxfer: from the producer's first word that KV is ready to the outcome, of loads that were delivered.",
        buckets=NIXL_SECONDS,
    ),
    f"{NIXL}bytes_transferred": Metric(
        "histogram", "By kvxfer: bytes of each load that was delivered.", buckets=NIXL_BYTES
    ),
    f"{NIXL}num_failed_transfers": Metric(
        "counter", "By kvxfer: loads that failed, whatever the reason, links that could not be made included."
    ),
    f"{NIXL}num_kv_expired_reqs": Metric(
        "counter", "By kvxfer: offers whose lease has ended; counted at the producer."
    ),
    f"{NIXL}num_failed_notifications": Metric("counter", "By kvxfer: always 0, because it sends no notifications."),
    f"{NIXL}num_notifications_after_expiry": Metric(
        "counter", "By kvxfer: always 0, because what comes too late fails."
    ),
}
GAUGES = {"quarantined": "quarantined_bytes", "loads": "loads_in_hand", "leases": "offers_in_hand"}


class KVXferPromMetrics(KVConnectorPromMetrics):
    """Counters, gauges and histograms in vLLM's own registry, with vLLM's labels."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        kinds = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}
        # NIXL's own connector, if it stands beside this one, uses the same names.
        beside = [kind.__module__ for connector in together(vllm_config) for kind in connector.__mro__]
        nixl = any(module.startswith("vllm.distributed.kv_transfer.kv_connector.v1.nixl") for module in beside)
        self._peers: set[str] = set()
        self._metrics: dict[str, Any] = {}
        for name, metric in METRICS.items():
            if nixl and name.startswith(NIXL):
                continue
            more: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.kind == "gauge":
                more["multiprocess_mode"] = "mostrecent"  # of several front ends, one hears each change
            names = [*labelnames, *metric.labels]
            made = kinds[metric.kind](name=name, documentation=metric.documentation, labelnames=names, **more)
            self._metrics[name] = made
            for values, shown in product(per_engine_labelvalues.values(), metric.shown):
                made.labels(*values, *shown)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, values = transfer_stats_data, self.per_engine_labelvalues[engine_idx]

        def of(name: str, *labels: str) -> Any:
            return self._metrics[name].labels(*values, *labels)

        for outcome, nbytes, seconds, _ in data["loads"]:
            of("kvxfer_transfers", outcome).inc()
            if outcome == DELIVERED:
                of("kvxfer_kv_bytes").inc(nbytes)
                of("kvxfer_transfer_seconds").observe(seconds)
        for outcome, seconds in data["requests"]:
            of("kvxfer_requests", outcome).inc()
            if outcome == DELIVERED:
                of("kvxfer_request_seconds").observe(seconds)
        for name in ("offers", "not_offered", "not_loaded"):
            for key, n in data[name].items():
                of(f"kvxfer_{name}", key).inc(n)
        of("kvxfer_unclaimed_offers").inc(data["unclaimed"].get("offers", 0))
        for key, n in data["failures"].items():
            outcome, _, peer = key.partition("/")
            of("kvxfer_failures", outcome, self._named(peer)).inc(n)
        counts = data["counts"]
        of("kvxfer_wasted_bytes").inc(counts.get("wasted", 0))
        of("kvxfer_corrupt").inc(counts.get("corrupt", 0))
        for way in ("direct", "staged"):
            of("kvxfer_parts", way).inc(counts.get(way, 0))
        self._prefixes(of, data["prefixes"])
        if data["gauges"]:
            for name, metric in GAUGES.items():
                of(f"kvxfer_{metric}").set(data["gauges"][name])
            for kind, n in data["gauges"]["links"].items():
                of("kvxfer_links", *kind.split("/", 1)).set(n)
            for key, pace in data["gauges"]["paces"].items():
                backend, _, peer = key.partition("/")
                of("kvxfer_link_bytes_per_second", self._named(peer), backend).set(pace)
        if f"{NIXL}num_failed_transfers" in self._metrics:
            self._as_nixl(of, data)

    def _named(self, peer: str) -> str:
        """Return the label of a peer's host: its own for the first of them."""
        if len(self._peers) < MAX_PEERS:
            self._peers.add(peer)
        return peer if peer in self._peers else OTHERS

    @staticmethod
    def _prefixes(of: Any, news: Mapping[str, int]) -> None:
        for name, n in news.items():
            kind, _, field = name.rpartition("/")
            if kind and field in ASKED:
                of("kvxfer_prefix_requests", ASKED[field], kind).inc(n)
            elif kind:
                of("kvxfer_prefix_tokens", field, kind).inc(n)
        held, refused = news.get("/held", 0), news.get("/refused", 0)
        for answer, n in (
            ("held", held),
            ("refused", refused),
            ("nothing", news.get("/inquiries", 0) - held - refused),
        ):
            of("kvxfer_inquiries", answer).inc(max(n, 0))
        of("kvxfer_inquired_tokens").inc(news.get("/tokens", 0))

    @staticmethod
    def _as_nixl(of: Any, data: dict[str, Any]) -> None:
        for outcome, nbytes, seconds, waited in data["loads"]:
            if outcome == DELIVERED:
                of(f"{NIXL}xfer_time_seconds").observe(seconds - waited)
                of(f"{NIXL}bytes_transferred").observe(nbytes)
            elif outcome != FailureKind.CANCELLED:
                of(f"{NIXL}num_failed_transfers").inc()
        of(f"{NIXL}num_kv_expired_reqs").inc(data["offers"].get(FailureKind.UNFETCHED, 0))
