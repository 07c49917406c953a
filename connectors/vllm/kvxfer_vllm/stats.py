"""The transfers' statistics, as vLLM logs and exports them. ``docs/metrics.md`` lists the metrics."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvxfer.control.link import LinkStatus
from kvxfer.failures import FailureKind
from kvxfer.protocol.values import Ended, Stats
from kvxfer_vllm.nixl_metrics import NixlNamedMetrics
from kvxfer_vllm.prefix_metrics import PrefixMetrics

__all__ = ["CANCELLED", "COMPUTED", "DELIVERED", "ELSEWHERE", "KVXferPromMetrics", "KVXferStats", "Reason"]

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

DELIVERED, COMPUTED, CANCELLED, ELSEWHERE = "delivered", "computed", "cancelled", "elsewhere"
"""What becomes of a request's load, besides the kinds of failure. A request that ends as ``computed`` needed no load, because all was
cached or an earlier one had used the offer. Of one that ends as ``elsewhere``, vLLM has loaded a part from another connector of
its ``MultiConnector``, and so nothing from here."""

COUNTS = ("corrupt", "direct", "staged")
"""The agent's stats that only ever grow."""
TALLIES = ("offers", "unclaimed", "not_offered", "not_loaded", "failures", "counts", "prefixes")
"""The parts of what vLLM is told that are numbers by name, which add up."""
GAUGES = {"quarantined_bytes": "quarantined", "fetches": "loads", "offers": "leases"}
"""The agent's stats that go up and down, and their names here."""

MAX_PEERS = 64
"""The most hosts that failed loads are counted for, one by one; the others are counted together."""
OTHERS = "others"

_ADDRESS = re.compile(r"(?:tcp://)?(\[[^\]]*\]|[^\s,:]+):\d+")


class Reason(enum.StrEnum):
    """Why a request is not offered, or not loaded: a closed set, the same in metrics and in the log."""

    WRONG_ROLE = "wrong_role"
    INVALID = "invalid"
    ADAPTER = "adapter"
    STREAMING_INPUT = "streaming_input"
    DATA_PARALLEL = "data_parallel"
    NOTHING = "nothing"
    OTHER_CONTENT = "other_content"
    GIVEN_UP = "given_up"
    PARAMS = "params"
    STATE = "state"


class KVXferStats(KVConnectorStats):
    """What vLLM is told about an engine's transfers.

    ``data`` has these keys:

    - ``loads``: for each load that has ended on a rank, ``[outcome, bytes, seconds, seconds of these spent waiting]``. The outcome
      is ``delivered`` or the kind of failure.
    - ``requests``: for each request of the engine whose load has ended, ``[outcome, seconds]``; see ``requests.py``.
    - ``failures``: how many loads have failed, by ``"outcome/host of the peer"``; ``wasted``: the bytes that had come for them.
    - ``offers``: how many offers have ended with each outcome.
    - ``unclaimed``: how many of them nobody had asked for when their lease ended, under the key ``offers``.
    - ``not_offered``: how many requests were to be offered and are not, by reason; see ``Reason``.
    - ``not_loaded``: how many requests were to load and do not, by reason; see ``Reason``.
    - ``prefixes``: by how much the counts of prefixes have grown; see ``prefix_metrics``.
    - ``counts``: by how much the agents' counts have grown.
    - ``gauges``: if one of them has changed on a rank, the current numbers of ``quarantined`` bytes, ``loads`` and ``leases``, and of
      ``links`` by ``"role/back end"``, over all ranks. vLLM tells each change to one of its front ends, so each has all of it.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data=data or {})
        if not data:
            self.reset()

    def record(self, event: Ended) -> None:
        """Record that a load or an offer has ended."""
        outcome = str(event.outcome.kind or DELIVERED)
        if event.role == "producer":
            self.count("offers", outcome, 1)
            self.count("unclaimed", "offers", int(event.unclaimed))
        else:
            self.data["loads"].append([outcome, event.nbytes, event.seconds, event.waited])
            failure = event.outcome.failure
            if failure is not None and failure.kind is not FailureKind.CANCELLED:
                self.count("failures", f"{outcome}/{_host(failure.peer)}", 1)
                self.count("counts", "wasted", event.nbytes)

    def request(self, outcome: str, seconds: float) -> None:
        """Record that a request's load has ended, and how long after the request's arrival."""
        self.data["requests"].append([outcome, seconds])

    def note(self, before: Gauges | None, now: Gauges) -> None:
        """Record how a rank's agent's counts have grown since ``before``; None if there was nothing before."""
        for name in COUNTS:
            self.count("counts", name, getattr(now.stats, name) - (getattr(before.stats, name) if before else 0))

    def count(self, of: str, name: str, n: int = 1) -> None:
        """Add to one of ``TALLIES``."""
        if n:
            self.data[of][name] = self.data[of].get(name, 0) + n

    def reset(self) -> None:
        self.data = {"loads": [], "requests": [], **{of: {} for of in TALLIES}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for of in ("loads", "requests"):
            self.data[of] += other.data[of]
        for of in TALLIES:
            for name, n in other.data[of].items():
                self.count(of, name, n)
        self.data["gauges"] = other.data["gauges"] or self.data["gauges"]
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        loads, counts = self.data["loads"], self.data["counts"]
        good = [x for x in loads if x[0] == DELIVERED]
        seconds = sum(x[2] for x in good)
        bad = Counter(f"failed, {x[0]}" for x in loads if x[0] != DELIVERED)
        return {
            "loads": len(loads),
            "not delivered": len(loads) - len(good),
            **bad,
            **{f"not offered, {reason}": n for reason, n in self.data["not_offered"].items()},
            **{f"not loaded, {reason}": n for reason, n in self.data["not_loaded"].items()},
            **{f"{of} that nobody asked for": n for of, n in self.data["unclaimed"].items()},
            "MB": round(sum(x[1] for x in good) / 1e6, 3),
            "mean ms": round(1e3 * seconds / max(len(good), 1), 3),
            "parts direct": counts.get("direct", 0),
            "parts staged": counts.get("staged", 0),
            "corrupt": counts.get("corrupt", 0),
        }


class Gauges:
    """The numbers of a rank's agent at one moment; ``values`` are those that go up and down."""

    def __init__(self, stats: Stats, links: Iterable[LinkStatus]) -> None:
        self.stats = stats
        self.values: dict[str, Any] = {name: getattr(stats, field) for field, name in GAUGES.items()}
        self.values["links"] = dict(Counter(f"{link.role}/{link.backend}" for link in links if link.up))


class RankGauges:
    """The gauges of all ranks of an engine, as the scheduler's process has heard of them last."""

    def __init__(self) -> None:
        self._by_rank: dict[str, dict[str, Any]] = {}
        self._links: set[str] = set()  # all kinds that there ever were

    def heard(self, news: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Take in what has changed; return the sums over all ranks, with a 0 for each kind of link that there is no more."""
        self._by_rank |= news
        self._links.update(kind for rank in news.values() for kind in rank["links"])
        ranks = self._by_rank.values()
        links = {kind: sum(rank["links"].get(kind, 0) for rank in ranks) for kind in sorted(self._links)}
        return {**{name: sum(rank[name] for rank in ranks) for name in GAUGES.values()}, "links": links}


class KVXferPromMetrics(KVConnectorPromMetrics):
    """Counters, gauges and histograms in vLLM's own registry, with vLLM's labels."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[Any]]
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        kinds = {"counter": self._counter_cls, "gauge": self._gauge_cls, "histogram": self._histogram_cls}

        def make(kind: str, name: str, documentation: str, *labels: str, **more: Any) -> Any:
            return kinds[kind](name=name, documentation=documentation, labelnames=[*labelnames, *labels], **more)

        counter, histogram = partial(make, "counter"), partial(make, "histogram")
        gauge = partial(make, "gauge", multiprocess_mode="mostrecent")  # of several front ends, one hears each change
        self._bytes = counter("kvxfer_kv_bytes", "Bytes of KV cache that arrived.")
        self._wasted = counter("kvxfer_wasted_bytes", "Bytes of KV cache that arrived for loads that then failed.")
        self._failures = counter(
            "kvxfer_failures", "Loads that have failed, by kind of failure and by the peer's host.", "outcome", "peer"
        )
        self._peers: set[str] = set()
        self._seconds = histogram(
            "kvxfer_transfer_seconds", "Time from want to outcome, for loads that were delivered.", buckets=BUCKETS
        )
        self._loads = counter(
            "kvxfer_transfers", "Loads that have ended, by outcome: delivered, or the kind of failure.", "outcome"
        )
        self._requests = counter(
            "kvxfer_requests",
            "Requests whose load has ended on all ranks, by outcome: delivered, computed here, loaded elsewhere, or the kind of failure.",
            "outcome",
        )
        self._request_seconds = histogram(
            "kvxfer_request_seconds",
            "Time from a request's arrival to the end of its load, for requests whose load was delivered.",
            buckets=BUCKETS,
        )
        self._offers = counter(
            "kvxfer_offers", "Offers that have ended, by outcome: delivered, or the kind of failure.", "outcome"
        )
        self._unclaimed = counter(
            "kvxfer_unclaimed_offers", "Offers whose lease has ended and for which no engine had ever asked."
        )
        self._not_offered = counter(
            "kvxfer_not_offered", "Requests that were to be offered to other engines and are not, by reason.", "reason"
        )
        self._not_loaded = counter(
            "kvxfer_not_loaded",
            "Requests that were to load from another engine and are computed here, by reason.",
            "reason",
        )
        self._parts = counter("kvxfer_parts", "Parts of transfers moved by this side, direct or staged.", "way")
        self._corrupt = counter(
            "kvxfer_corrupt", "Transfers whose bytes have another checksum than the bytes that were sent."
        )
        self._gauges = {
            "quarantined": gauge(
                "kvxfer_quarantined_bytes", "Bytes of ended transfers that the back end may still touch."
            ),
            "loads": gauge("kvxfer_loads_in_hand", "Loads that are under way, over all ranks."),
            "leases": gauge("kvxfer_offers_in_hand", "Offers that are leased or being read, over all ranks."),
        }
        self._links = gauge("kvxfer_links", "Links that are up, over all ranks.", "role", "backend")
        self._prefixes = PrefixMetrics(make)
        self._nixl = NixlNamedMetrics.of(vllm_config, make)
        for values in per_engine_labelvalues.values():
            counts = self._corrupt, self._bytes, self._wasted, self._unclaimed, self._seconds, self._request_seconds
            for metric in (*counts, *self._gauges.values()):
                metric.labels(*values)
            for reason in Reason:
                self._not_offered.labels(*values, str(reason))
            for reason in (Reason.PARAMS, Reason.STATE):
                self._not_loaded.labels(*values, str(reason))
            for way in ("direct", "staged"):
                self._parts.labels(*values, way)
            for outcome in (DELIVERED, COMPUTED, ELSEWHERE, *FailureKind):
                self._requests.labels(*values, str(outcome))
            for outcome in (DELIVERED, *FailureKind):
                self._loads.labels(*values, str(outcome))
                self._offers.labels(*values, str(outcome))
            self._prefixes.begin(values)
            if self._nixl is not None:
                self._nixl.begin(values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        data, values = transfer_stats_data, self.per_engine_labelvalues[engine_idx]
        for outcome, nbytes, seconds, _ in data["loads"]:
            self._loads.labels(*values, outcome).inc()
            if outcome == DELIVERED:
                self._bytes.labels(*values).inc(nbytes)
                self._seconds.labels(*values).observe(seconds)
        for outcome, seconds in data["requests"]:
            self._requests.labels(*values, outcome).inc()
            if outcome == DELIVERED:
                self._request_seconds.labels(*values).observe(seconds)
        for outcome, n in data["offers"].items():
            self._offers.labels(*values, outcome).inc(n)
        self._unclaimed.labels(*values).inc(data["unclaimed"].get("offers", 0))
        for reason, n in data["not_offered"].items():
            self._not_offered.labels(*values, reason).inc(n)
        for reason, n in data["not_loaded"].items():
            self._not_loaded.labels(*values, reason).inc(n)
        for key, n in data["failures"].items():
            outcome, _, peer = key.partition("/")
            if len(self._peers) < MAX_PEERS:
                self._peers.add(peer)
            self._failures.labels(*values, outcome, peer if peer in self._peers else OTHERS).inc(n)
        counts = data["counts"]
        self._wasted.labels(*values).inc(counts.get("wasted", 0))
        self._corrupt.labels(*values).inc(counts.get("corrupt", 0))
        for way in ("direct", "staged"):
            self._parts.labels(*values, way).inc(counts.get(way, 0))
        self._prefixes.observe(values, data["prefixes"])
        if data["gauges"]:
            for name, metric in self._gauges.items():
                metric.labels(*values).set(data["gauges"][name])
            for kind, n in data["gauges"]["links"].items():
                self._links.labels(*values, *kind.split("/", 1)).set(n)
        if self._nixl is not None:
            self._nixl.observe(values, data)


def _host(peer: str) -> str:
    """Return the host, or hosts, of a peer that a failure names by its addresses."""
    found = sorted({match[1] for match in _ADDRESS.finditer(peer)})
    return ",".join(found) or "unknown"
