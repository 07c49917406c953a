"""Our connector as one of several inside vLLM's `MultiConnector`."""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import msgspec
import prometheus_client
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

import kvxfer_vllm
from kvxfer.errors import ConfigError
from kvxfer.protocol.values import Stats
from tests.vllm.cases import OFFER, check, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import FULL, HYBRID, PlayedEngine, ours, prompt
from tests.vllm.wire import Wire

OURS = {"kv_connector": "KVXferConnector", "kv_connector_module_path": "kvxfer_vllm", "kv_role": "kv_both"}


def sibling(**extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "tests.vllm.sibling",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def multi(*children: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": list(children)},
    )


ORDERS = pytest.mark.parametrize("ours_first", [True, False], ids=["first", "last"])


def order(ours_first: bool, other: dict[str, Any]) -> KVTransferConfig:
    return multi(OURS, other) if ours_first else multi(other, OURS)


@ORDERS
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("patience", [0, 3, 30])
def test_beside_one_that_saves(make: Make, wire: Wire, ours_first: bool, groups: Any, patience: int) -> None:
    """A finished request's blocks stay until both have let them go, whoever is first."""
    transfer = order(ours_first, sibling(patience=patience))
    p, d = make(groups, transfer=transfer), make(groups, transfer=transfer)
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(2)
    p.steps(10)
    assert p.free < p.blocks - 1, "the sibling's word alone has freed what is to be read"
    wire.paused = False
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3
    p.steps(5)
    assert (p.free == p.blocks - 1) == (patience < 30), "our word alone has freed what the sibling saves"


@ORDERS
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("ends", ["aborted", "failed"])
@pytest.mark.parametrize("patience", [0, 3, 30])
def test_a_load_that_ends_its_request_beside_one_that_saves(
    make: Make, wire: Wire, ours_first: bool, ends: str, policy: str, patience: int
) -> None:
    """vLLM would free the blocks at the end of the load, and again once the sibling is done with them."""
    transfer = order(ours_first, sibling(patience=patience))
    transfer.kv_load_failure_policy = policy
    p, d = make(transfer=transfer), make(transfer=transfer)
    params = prefill(p, prompt(90))
    wire.paused = True
    name = d.add(prompt(90), params)
    d.steps(2)
    (load,) = wire.loads(d)
    wire.begin(load)
    if ends == "aborted":
        d.abort(name)
        d.steps(patience // 5)
    wire.fail(load, "the link broke", quiet=False)
    d.steps(patience + 6)
    assert ends == "failed" or d.free < d.blocks - 1, "blocks are free to which a load may still write"
    wire.quiet(load)
    wire.paused = False
    d.run(p)
    assert d.free == d.blocks - 1
    p.lease_ends()


def test_beside_the_example(make: Make, tmp_path: pathlib.Path) -> None:
    """vLLM's own `ExampleConnector`, which knows of one group only."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    p, d = make(transfer=multi(OURS, example), hybrid=False), make(transfer=multi(OURS, example), hybrid=False)
    text = prompt(90)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3


@ORDERS
def test_handshakes(make: Make, monkeypatch: pytest.MonkeyPatch, ours_first: bool) -> None:
    """`MultiConnector` gives the first child's metadata to all, and some raise on what is not theirs: ours goes another
    way there, and what comes from others is ignored."""
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", object())  # as in a worker process: not ours
    transfer = order(ours_first, sibling(strict=True))
    p, d = make(transfer=transfer), make(transfer=transfer)
    text = prompt(90)
    decode(d, text, prefill(p, text), p)
    assert [m is p.agents[0].descriptor for m in ours(p.scheduler.connector)._sched.side.directory._ranks] == [True]


def test_a_back_end_that_is_missing_is_found_before_weights_are_loaded(make: Make) -> None:
    """vLLM asks `MultiConnector` in the process that reads its arguments, and again before the cache is laid out; that asks each child."""
    broken = multi(sibling(), {**OURS, "kv_connector_extra_config": {"backend": "no-such"}})
    with pytest.raises(ConfigError, match="no-such"):
        MultiConnector.requires_piecewise_for_cudagraph(broken.kv_connector_extra_config)
    config = copy.copy(make(transfer=multi(OURS, sibling())).scheduler.vllm_config)
    MultiConnector.get_required_kvcache_layout(config)
    config.kv_transfer_config = broken
    with pytest.raises(ConfigError, match="no-such"):
        MultiConnector.get_required_kvcache_layout(config)


def test_handshake_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others find the engine before its first step."""
    p = make()
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", p.workers[0])
    assert p.workers[0].get_handshake_metadata() is not None
    assert len(ours(p.scheduler.connector)._sched.side.directory._ranks) == 1


def crossed(engine: PlayedEngine) -> list[Any]:
    """What an engine has said of its transfers, as it reaches the front end."""
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(stats)) for stats in engine.stats]


def loads(engine: PlayedEngine) -> list[Any]:
    ours = [stats["KVXferConnector"] for stats in crossed(engine)]
    return [load for said in ours for load in said["loads"]]


def test_statistics(make: Make, wire: Wire) -> None:
    """What crosses to the front end is rebuilt there, logged and exported under our name."""
    kvxfer_vllm.register()
    transfer = multi(OURS, sibling())
    p, d = make(transfer=transfer, ranks=2), make(transfer=transfer, ranks=2)
    text = prompt(90)
    decode(d, text, prefill(p, text), p)
    other = prompt(70, seed=1)
    params = prefill(p, other)
    wire.paused = True
    name = d.add(other, params)
    d.steps(2)
    for load in wire.loads(d):
        wire.fail(load, "the link broke")
    wire.paused = False
    for agent, quarantined in zip((a for a in wire.agents if a.engine is d), (100, 20), strict=True):
        agent.said = Stats(fetches=0, offers=0, quarantined_bytes=quarantined, corrupt=1, direct=3, staged=2)
    d.run(p, until=name)
    assert [load[0] for load in loads(d)] == ["delivered", "delivered", "peer_lost", "peer_lost"]
    rebuilt, *more = [MultiConnector.build_kv_connector_stats(stats) for stats in crossed(d)]
    for stats in more:
        rebuilt = rebuilt.aggregate(stats)
    assert rebuilt.reduce()["KVXferConnector"]["loads"] == 4
    registry = prometheus_client.CollectorRegistry()
    config: Any = d.scheduler.vllm_config
    metrics = MultiConnector.build_prom_metrics(config, _types(registry), ["engine"], {0: ["0"]})
    for stats in crossed(d):
        metrics.observe(stats, 0)
    assert registry.get_sample_value("kvxfer_transfers_total", {"engine": "0", "outcome": "delivered"}) == 2
    assert registry.get_sample_value("kvxfer_transfers_total", {"engine": "0", "outcome": "peer_lost"}) == 2
    assert registry.get_sample_value("kvxfer_transfer_seconds_count", {"engine": "0"}) == 2
    for outcome in ("delivered", "peer_lost"):
        assert registry.get_sample_value("kvxfer_requests_total", {"engine": "0", "outcome": outcome}) == 1
    assert registry.get_sample_value("kvxfer_request_seconds_count", {"engine": "0"}) == 1
    assert registry.get_sample_value("kvxfer_parts_total", {"engine": "0", "way": "direct"}) == 6
    assert registry.get_sample_value("kvxfer_parts_total", {"engine": "0", "way": "staged"}) == 4
    assert registry.get_sample_value("kvxfer_corrupt_total", {"engine": "0"}) == 2
    assert registry.get_sample_value("kvxfer_quarantined_bytes", {"engine": "0"}) == 120


def _types(registry: prometheus_client.CollectorRegistry) -> dict[Any, Any]:
    """Prometheus' own metrics, registered apart from the process's."""
    kinds = prometheus_client.Counter, prometheus_client.Histogram, prometheus_client.Gauge

    def apart(kind: Any) -> Any:
        return lambda **kw: kind(registry=registry, **kw)

    return {kind: apart(kind) for kind in kinds}


def test_abort_and_preemption_beside_one_that_saves(make: Make, wire: Wire) -> None:
    transfer = multi(OURS, sibling(patience=5))
    p, d = make(transfer=transfer), make(transfer=transfer, blocks=22, caching=False)
    texts = [prompt(60, seed=i) for i in range(4)]
    names = [d.add(text, prefill(p, text), n=60) for text in texts]
    gone = p.add(prompt(80, seed=9), OFFER, n=30)
    p.steps(4)
    p.abort(gone)
    d.run(p)
    for name, text in zip(names, texts, strict=True):
        check(d, name, text, 60)
