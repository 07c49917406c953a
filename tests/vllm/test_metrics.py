"""What vLLM's `/metrics` shows: our names, those of NixlConnector, and the dashboard that reads them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from kvxfer.control.link import LinkStatus
from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import TransferId
from kvxfer.protocol.messages import Explain
from kvxfer.protocol.values import Ended, Stats
from kvxfer.testing.router.http import read_samples
from kvxfer_vllm.metrics import KVXferPromMetrics
from kvxfer_vllm.stats import Gauges, KVXferStats, RankGauges
from tests.conftest import require
from tests.vllm.cases import decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ours, prompt
from tests.vllm.wire import Wire

ROOT = Path(__file__).parents[2]
LABELS, VALUES = ["model_name", "engine"], ["tiny", "0"]
T = TransferId("own/1/x", 0)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> CollectorRegistry:
    return CollectorRegistry()


def metrics(registry: CollectorRegistry) -> KVXferPromMetrics:
    def of(kind: Any) -> Any:
        return lambda **arguments: kind(registry=registry, **arguments)

    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="KVXferConnector"))
    kinds = {Counter: of(Counter), Gauge: of(Gauge), Histogram: of(Histogram)}
    return KVXferPromMetrics(config, kinds, LABELS, {0: VALUES})


def counted() -> KVXferStats:
    """A delivered load, one that timed out, a cancelled one; offers likewise; and a rank's gauges."""
    stats = KVXferStats()

    def ended(role: Any, kind: FailureKind | None, waited: float = 0.0) -> None:
        outcome = Outcome(None if kind is None else Failure(kind, "why"))
        stats.record(Ended(role, T, "r", outcome, 4096, 0.5, 1, waited))

    ended("consumer", None, 0.25)
    ended("consumer", FailureKind.TIMED_OUT)
    ended("consumer", FailureKind.CANCELLED)
    ended("producer", None)
    ended("producer", FailureKind.UNFETCHED)
    ended("producer", FailureKind.TIMED_OUT)
    links = [LinkStatus("p (10.0.0.7:41233)", "consumer", "zmq", up, {}, None, 4e9) for up in (True, True, False)]
    now = Gauges(Stats(2, 3, 7, 0, 5, 1), links)
    stats.note(None, now)
    stats.data["gauges"] = RankGauges().heard({"0.0": now.values})
    return stats


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {**dict(zip(LABELS, VALUES, strict=True)), **labels})


def test_all_that_ranks_count_is_exported(registry: CollectorRegistry) -> None:
    exported = metrics(registry)
    stats = KVXferStats(json.loads(json.dumps(counted().data)))  # as it comes from another process
    assert stats.aggregate(KVXferStats()).reduce()["failed, timed_out"] == 1
    exported.observe(stats.data)
    assert value(registry, "kvxfer_transfers_total", outcome="timed_out") == 1
    assert value(registry, "kvxfer_offers_total", outcome="timed_out") == 1
    assert value(registry, "kvxfer_offers_total", outcome="delivered") == 1
    assert value(registry, "kvxfer_offers_total", outcome="corrupt") == 0
    assert value(registry, "kvxfer_loads_in_hand") == 2
    assert value(registry, "kvxfer_offers_in_hand") == 3
    assert value(registry, "kvxfer_quarantined_bytes") == 7
    assert value(registry, "kvxfer_links", role="consumer", backend="zmq") == 2


def test_what_is_not_offered_and_what_nobody_asked_for(registry: CollectorRegistry) -> None:
    exported, stats = metrics(registry), KVXferStats()
    for unclaimed in (True, False, True):
        timed_out = Outcome(Failure(FailureKind.TIMED_OUT, "why"))
        stats.record(Ended("producer", T, "r", timed_out, 0, 0.5, 1, unclaimed=unclaimed))
    stats.count("not_offered", "nothing")
    stats.count("not_offered", "nothing")
    assert stats.aggregate(stats).reduce()["not offered, nothing"] == 4
    exported.observe(json.loads(json.dumps(stats.data)))
    assert value(registry, "kvxfer_unclaimed_offers_total") == 4
    assert value(registry, "kvxfer_not_offered_total", reason="nothing") == 4
    assert value(registry, "kvxfer_not_offered_total", reason="data_parallel") == 0


def test_requests_by_what_became_of_their_loads(make: Make, wire: Wire) -> None:
    """Each counts once, whatever the number of ranks."""
    p, d = make(ranks=2), make(ranks=2)
    text = prompt(49)
    decode(d, text, prefill(p, text), p)
    decode(d, text, prefill(p, text), p)  # all but the last token is cached here by now
    wire.paused = True
    name = d.add(prompt(70), prefill(p, prompt(70)))
    d.steps(2)
    d.abort(name)
    wire.paused = False
    d.run(p)
    told = [outcome for stats in d.stats for outcome, _ in stats["requests"]]
    assert told == ["delivered", "computed", "cancelled"]


def test_gauges_are_sums_over_ranks_and_fall_again(registry: CollectorRegistry) -> None:
    exported, ranks = metrics(registry), RankGauges()

    def say(rank: str, n: int) -> None:
        stats = KVXferStats()
        stats.data["gauges"] = ranks.heard({rank: held(n)})
        exported.observe(stats.data)

    for rank, n in (("0.0", 2), ("0.1", 3), ("0.0", 0)):
        say(rank, n)
    assert value(registry, "kvxfer_links", role="producer", backend="cma") == 3
    assert value(registry, "kvxfer_loads_in_hand") == 3
    say("0.1", 0)
    assert value(registry, "kvxfer_links", role="producer", backend="cma") == 0


def test_the_pace_of_links_is_told_by_host_of_the_slowest_rank(registry: CollectorRegistry) -> None:
    exported, ranks, stats = metrics(registry), RankGauges(), KVXferStats()
    for rank, pace in (("0.0", 4.04e9), ("0.1", 9e8)):
        links = [
            LinkStatus("p (10.0.0.7:41233)", "consumer", "nixl", True, {}, None, pace),
            LinkStatus("p (10.0.0.7:41234)", "consumer", "nixl", True, {}, None, 5e9),
            LinkStatus("q (10.0.0.8:41233)", "consumer", "nixl", True, {}, None),
        ]
        stats.data["gauges"] = ranks.heard({rank: Gauges(Stats(0, 0, 0, 0, 0, 0), links).values})
        exported.observe(stats.data)
        told = value(registry, "kvxfer_link_bytes_per_second", peer="10.0.0.7", backend="nixl")
        assert told == float(f"{pace:.2g}")
    assert value(registry, "kvxfer_link_bytes_per_second", peer="10.0.0.8", backend="nixl") is None


def held(n: int) -> dict[str, Any]:
    """A rank's gauges."""
    links = [LinkStatus("p", "producer", "cma", True, {}, None)] * n
    return Gauges(Stats(n, n, n, 0, 0, 0), links).values


FRONT_ENDS = """
import json, multiprocessing, sys
from types import SimpleNamespace
from prometheus_client import Counter, Gauge, Histogram
from kvxfer_vllm.metrics import KVXferPromMetrics

def front_end(pipe):
    config = SimpleNamespace(kv_transfer_config=None)
    exported = KVXferPromMetrics(config, {Gauge: Gauge, Counter: Counter, Histogram: Histogram}, ["engine"], {0: ["0"]})
    pipe.send("its files are made")
    while True:
        exported.observe(pipe.recv())
        pipe.send("done")

forks, ends = multiprocessing.get_context("fork"), []
for _ in range(2):
    ours, theirs = forks.Pipe()
    forks.Process(target=front_end, args=(theirs,), daemon=True).start()
    ours.recv()
    ends.append(ours)
for line in sys.stdin:
    which, data = json.loads(line)
    ends[which].send(data)
    print(ends[which].recv(), flush=True)
"""


def test_gauges_of_several_front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM tells each change to one of its API servers; a page of any of them shows the last."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FRONT_ENDS], **pipes) as front_ends:

        def observe(which: int, stats: KVXferStats) -> None:
            front_ends.stdin.write(json.dumps([which, stats.data]) + "\n")
            front_ends.stdin.flush()
            assert front_ends.stdout.readline() == "done\n"

        ranks = RankGauges()
        for front_end, rank, n in ((0, "0.0", 1), (1, "0.1", 2), (0, "0.0", 0), (1, "0.1", 0)):
            stats = KVXferStats()
            stats.data["gauges"] = ranks.heard({rank: held(n)})
            observe(front_end, stats)
            first_news = KVXferStats()
            first_news.count("offers", "delivered")  # which changes no gauge
            observe(0, first_news)
            page = CollectorRegistry()
            MultiProcessCollector(page)
            total = {("0.0", 1): 1, ("0.1", 2): 3, ("0.0", 0): 2, ("0.1", 0): 0}[rank, n]
            assert page.get_sample_value("kvxfer_loads_in_hand", {"engine": "0"}) == total
            link = {"engine": "0", "role": "producer", "backend": "cma"}
            assert page.get_sample_value("kvxfer_links", link) == total
        front_ends.stdin.close()


def failed(peer: str) -> KVXferStats:
    stats = KVXferStats()
    outcome = Outcome(Failure(FailureKind.TIMED_OUT, "why", peer))
    stats.record(Ended("consumer", T, "r", outcome, 4096, 0.5, 1, 0.0))
    return stats


@pytest.mark.parametrize(
    "peer, host",
    [
        ("tcp://10.0.0.7:4711", "10.0.0.7"),
        ("10.0.0.7:14579", "10.0.0.7"),
        ("tcp://[fd00::7]:4711, tcp://[fd00::7]:4712", "[fd00::7]"),
        ("tcp://p-1.example:1, tcp://p-2.example:1", "p-1.example,p-2.example"),
        ("", "unknown"),
    ],
)
def test_failures_are_counted_by_the_host_of_the_peer(registry: CollectorRegistry, peer: str, host: str) -> None:
    exported = metrics(registry)
    exported.observe(json.loads(json.dumps(failed(peer).aggregate(failed(peer)).data)))
    assert value(registry, "kvxfer_failures_total", outcome="timed_out", peer=host) == 2
    assert value(registry, "kvxfer_wasted_bytes_total") == 8192 and value(registry, "kvxfer_kv_bytes_total") == 0


def test_a_stranger_cannot_make_series_without_end(registry: CollectorRegistry) -> None:
    exported = metrics(registry)
    for i in range(1000):
        exported.observe(failed(f"tcp://10.0.{i // 250}.{i % 250}:1").data)
    series = [
        s for m in registry.collect() if m.name == "kvxfer_failures" for s in m.samples if s.name.endswith("_total")
    ]
    assert len(series) == 65 and sum(s.value for s in series) == 1000


def test_what_has_not_changed_is_not_sent() -> None:
    now = Gauges(Stats(1, 1, 0, 2, 3, 4), [])
    stats = KVXferStats()
    stats.note(now, now)
    assert stats.is_empty()


def test_names_and_units_of_nixl(registry: CollectorRegistry) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats as theirs

    exported = metrics(registry)
    exported.observe(counted().data)
    assert value(registry, "vllm:nixl_xfer_time_seconds_sum") == 0.25, "without the wait for the producer"
    assert value(registry, "vllm:nixl_xfer_time_seconds_count") == 1
    assert value(registry, "vllm:nixl_bytes_transferred_sum") == 4096
    assert value(registry, "vllm:nixl_num_failed_transfers_total") == 1, "a cancelled load has not failed"
    assert value(registry, "vllm:nixl_num_kv_expired_reqs_total") == 1

    nixl = CollectorRegistry()

    def of(kind: Any) -> Any:
        return lambda **arguments: kind(registry=nixl, **arguments)

    config = SimpleNamespace(kv_transfer_config=None)
    kinds = {Counter: of(Counter), Gauge: of(Gauge), Histogram: of(Histogram)}
    theirs.NixlPromMetrics(config, kinds, LABELS, {0: VALUES})
    known = {family.name: family for family in nixl.collect()}
    ours = {family.name: family for family in registry.collect() if family.name.startswith("vllm:")}
    assert len(ours) == 6 and ours.keys() <= SINCE_033
    for name, family in ours.items():
        if name not in known:  # vLLM before 0.33
            assert family.type == "counter"
            continue
        assert family.type == known[name].type
        edges = [{s.labels["le"] for s in f.samples if "le" in s.labels} for f in (family, known[name])]
        assert edges[0] == edges[1], name


SINCE_033 = {
    f"vllm:nixl_{name}"
    for name in (
        *("xfer_time_seconds", "post_time_seconds", "bytes_transferred", "num_descriptors", "num_failed_transfers"),
        *("num_failed_notifications", "num_kv_expired_reqs", "num_notifications_after_expiry"),
    )
}
"""What NixlConnector of vLLM 0.33 exports."""


def test_each_name_of_nixl_s_is_exported_or_explained(registry: CollectorRegistry) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats as theirs

    nixl = CollectorRegistry()
    kinds: dict[Any, Any] = {
        kind: (lambda made: lambda **arguments: made(registry=nixl, **arguments))(kind)
        for kind in (Counter, Gauge, Histogram)
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    theirs.NixlPromMetrics(config, kinds, LABELS, {0: VALUES})
    known = {family.name for family in nixl.collect()}
    assert known <= SINCE_033, "a newer vLLM has more"
    metrics(registry)
    page = (ROOT / "docs" / "metrics.md").read_text()
    missing = SINCE_033 - {family.name for family in registry.collect()}
    assert all(f"`{name.removeprefix('vllm:')}`" in page for name in missing)


def test_what_nixl_counts_apart_has_failed_here_too(registry: CollectorRegistry) -> None:
    """Since 0.33 a handshake that failed is a failed transfer: here a link that could not be made always was one."""
    stats = KVXferStats()
    for kind in (FailureKind.INCOMPATIBLE, FailureKind.NO_SUCH_ENGINE, FailureKind.PEER_LOST):
        stats.record(Ended("consumer", T, "r", Outcome(Failure(kind, "why")), 0, 0.1, 1, 0.0))
    metrics(registry).observe(stats.data)
    assert value(registry, "vllm:nixl_num_failed_transfers_total") == 3
    for never in ("num_failed_notifications", "num_notifications_after_expiry"):
        assert value(registry, f"vllm:nixl_{never}_total") == 0


def test_grafana_s_own_model_knows_all_of_the_dashboard() -> None:
    """What it does not know it drops; Grafana itself was not run."""
    require("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    text = (ROOT / "docs" / "grafana.json").read_text()

    def lost(before: Any, after: Any, where: str = "") -> list[str]:
        if isinstance(before, dict) and isinstance(after, dict):
            pairs = [(f"{where}/{key}", value, after.get(key)) for key, value in before.items()]
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            pairs = [(f"{where}/{i}", *pair) for i, pair in enumerate(zip(before, after, strict=True))]
        else:
            return [] if before == after else [where]
        return [path for at, old, new in pairs for path in lost(old, new, at)]

    def known(dashboard: Any) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))

    assert not lost(json.loads(text), known(json.loads(text)))
    wrong = {**json.loads(text), "panel": []}
    assert lost(wrong, known(wrong)) == ["/panel"]


def test_every_query_of_the_dashboard_names_what_is_exported(registry: CollectorRegistry) -> None:
    metrics(registry).observe(counted().data)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    labels = {s.name: set(s.labels) for family in families for s in family.samples}
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(queries) > 12 and len({p["id"] for p in board["panels"]}) == len(board["panels"])
    used = set()
    for query in queries:
        names = set(re.findall(r"\b(?:kvxfer_\w+|vllm:\w+)", query))
        assert names and names <= labels.keys(), query
        asked = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
        asked |= set(re.findall(r"(\w+)(?:=~|!~|=)\"", query))
        asked -= {"instance"}  # which Prometheus adds
        assert asked <= set().union(*(labels[name] for name in names)), query
        used |= {name.removesuffix("_bucket") for name in names}
    ours = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert {name for name in ours if name.startswith("kvxfer_")} <= used, "each metric of ours has its panel"


def test_alerts_name_what_is_exported_and_fire_where_they_should(registry: CollectorRegistry, tmp_path: Path) -> None:
    metrics(registry)
    rules = (ROOT / "docs" / "alerts.yml").read_text()
    ours = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert set(re.findall(r"\bkvxfer_\w+", rules)) <= ours
    require("system_libraries")
    promtool = ROOT / ".venv" / "system" / "packages" / "usr" / "bin" / "promtool"
    for source in (ROOT / "docs" / "alerts.yml", ROOT / "tests" / "docs" / "alerts_test.yml"):
        shutil.copy(source, tmp_path)
    ran = subprocess.run([promtool, "test", "rules", "alerts_test.yml"], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_our_names_are_as_prometheus_wants_them(registry: CollectorRegistry) -> None:
    """Of what is exported; names with a colon are those of vLLM's NixlConnector."""
    metrics(registry).observe(counted().data)
    blocks = re.split(r"(?=^# HELP )", generate_latest(registry).decode(), flags=re.M)
    page = "".join(block for block in blocks if block.startswith("# HELP kvxfer_"))
    assert page.count("# TYPE kvxfer_") > 15
    require("system_libraries")
    promtool = ROOT / ".venv" / "system" / "packages" / "usr" / "bin" / "promtool"
    ran = subprocess.run([promtool, "check", "metrics"], input=page, capture_output=True, text=True)
    assert ran.returncode == 0 and not ran.stderr, ran.stdout + ran.stderr


def test_params_that_lack_what_a_load_needs_are_counted(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    p, d = make(), make()
    text = prompt(49)
    told = prefill(p, text)
    for lost in ("kvxfer_transfer", "do_remote_prefill"):
        name = decode(d, text, {key: value for key, value in told.items() if key != lost}, p)
        (story,) = ours(d.scheduler.connector)._sched.side.directory.explain(Explain(name)).stories
        words = "the router must forward the prefill engine's params whole"
        assert words in story.text and story.role == "none"
        assert words in caplog.text
    decode(d, text, told, p)  # after which P holds nothing
    assert sum(stats["not_loaded"].get("params", 0) for stats in d.stats) == 2


def test_the_page_of_metrics_lists_what_is_exported(registry: CollectorRegistry) -> None:
    metrics(registry)
    page = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `((?:kvxfer_|vllm:)\w+)", page, re.MULTILINE))
    ours = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    assert listed == ours


def test_the_page_of_ray_is_read() -> None:
    page = 'ray_kvxfer_offers_total{ReplicaId="a1",outcome="delivered"} 5.0\nray_vllm_other 1.0\n'
    assert read_samples(page) == {"kvxfer_offers_total": [({"ReplicaId": "a1", "outcome": "delivered"}, 5.0)]}
