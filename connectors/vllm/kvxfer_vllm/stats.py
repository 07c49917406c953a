"""The transfers' statistics, as vLLM logs and exports them. ``docs/metrics.md`` lists the metrics."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvxfer.control.agent import Agent
from kvxfer.control.link import LinkStatus
from kvxfer.engine import AnswerCounts, AskCounts
from kvxfer.failures import FailureKind
from kvxfer.protocol.values import Ended, Stats

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


_ADDRESS = re.compile(r"(?:tcp://)?(\[[^\]]*\]|[^\s,:()]+):\d+")


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
      ``links`` by ``"role/back end"``, over all ranks, and the ``paces`` of links by ``"back end/host of the peer"``. vLLM tells each
      change to one of its front ends, so each has all of it.
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
        links = list(links)
        self.values["links"] = dict(Counter(f"{link.role}/{link.backend}" for link in links if link.up))
        # to two digits, so that little changes are not told
        known = [
            (f"{x.backend}/{_host(x.peer)}", float(f"{x.bytes_per_s:.2g}")) for x in links if x.up and x.bytes_per_s
        ]
        self.values["paces"] = _slowest(known)


class RankStats:
    """What one rank has counted and not told yet. One thread."""

    def __init__(self) -> None:
        self._counts = KVXferStats()
        self._noted: Gauges | None = None
        self._gauges: dict[str, dict[str, Any]] = {}  # those that the scheduler side has yet to hear of, under the rank

    def record(self, event: Ended) -> None:
        """Record that a load or an offer has ended."""
        self._counts.record(event)

    def look(self, agent: Agent, *, last: bool = False) -> None:
        """Take in what an agent has counted. After the ``last`` look comes another agent, which counts from zero."""
        before, now = self._noted, Gauges(agent.stats(), agent.links())
        self._noted = None if last else now
        self._counts.note(before, now)
        if before is None or before.values != now.values:
            self._gauges[f"{agent.cache.rank.pp}.{agent.cache.rank.tp}"] = now.values

    def take(self) -> KVXferStats | None:
        """Return what has been counted since the last call; None if that is nothing."""
        if self._counts.is_empty():
            return None
        out, self._counts = self._counts, KVXferStats()
        return out

    def take_gauges(self) -> dict[str, dict[str, Any]]:
        """Return the gauges that have changed since the last call, for the scheduler side."""
        out, self._gauges = self._gauges, {}
        return out


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
        paces = _slowest(pace for rank in ranks for pace in rank["paces"].items())
        return {**{name: sum(rank[name] for rank in ranks) for name in GAUGES.values()}, "links": links, "paces": paces}


class PrefixNews:
    """By how much counts have grown since they were last told; one thread."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}
        self._answered, self._asked = AnswerCounts(), dict[str, AskCounts]()

    def take(self, asked: Mapping[str, AskCounts], answered: AnswerCounts) -> dict[str, int]:
        """Return the growth of each count, by ``"kind/field"``; what others have asked has an empty kind. Leaves out zeros."""
        if answered == self._answered and asked == self._asked:  # as in most steps
            return {}
        self._answered, self._asked = copy(answered), {kind: copy(counts) for kind, counts in asked.items()}
        now = {f"/{field}": n for field, n in msgspec.structs.asdict(answered).items()}
        for kind, counts in asked.items():
            now |= {f"{kind}/{field}": n for field, n in msgspec.structs.asdict(counts).items()}
        news = {name: n - self._told.get(name, 0) for name, n in now.items() if n != self._told.get(name, 0)}
        self._told |= now
        return news


def _slowest(paces: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the least pace of each key."""
    found: dict[str, float] = {}
    for key, pace in paces:
        found[key] = min(pace, found.get(key, pace))
    return found


def _host(peer: str) -> str:
    """Return the host, or hosts, of a peer that a failure names by its addresses."""
    found = sorted({match[1] for match in _ADDRESS.finditer(peer)})
    return ",".join(found) or "unknown"
