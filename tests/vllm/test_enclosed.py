"""Inside `MultiConnector` a connector sees an entry's configuration in the place of the engine's: by which of them what goes."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvxfer.errors import ConfigError
from kvxfer_vllm.scheduler import FIRST_STEPS
from tests.vllm.cases import decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ours, prompt
from tests.vllm.test_multi import OURS, _types, crossed, sibling

NAMED = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvxfer_vllm.nixl", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
NESTED = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"connectors": [OURS, sibling()]},
}
SAID = "kv_load_failure_policy is 'fail'"


def multi(*children: dict[str, Any], policy: str = "recompute", role: str = "kv_both") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": list(children)},
    )


@pytest.mark.parametrize("ours_first", [True, False])
@pytest.mark.parametrize("entry", [OURS, NAMED], ids=["ours", "named"])
@pytest.mark.parametrize("child", [None, "fail", "recompute"])
@pytest.mark.parametrize("outer", ["fail", "recompute"])
def test_the_warning_is_about_the_policy_that_vllm_obeys(
    make: Make, caplog: pytest.LogCaptureFixture, outer: str, child: str | None, entry: dict[str, Any], ours_first: bool
) -> None:
    ours = entry if child is None else {**entry, "kv_load_failure_policy": child}
    engine = make(transfer=multi(*((ours, sibling()) if ours_first else (sibling(), ours)), policy=outer))
    assert engine.scheduler.recompute_kv_load_failures == (outer == "recompute")
    assert (SAID in caplog.text) == (outer == "fail")


@pytest.mark.parametrize("outer", ["fail", "recompute"])
def test_the_policy_of_the_outermost(make: Make, caplog: pytest.LogCaptureFixture, outer: str) -> None:
    engine = make(transfer=multi({**NESTED, "kv_load_failure_policy": "recompute"}, policy=outer))
    assert engine.scheduler.recompute_kv_load_failures == (outer == "recompute")
    assert (SAID in caplog.text) == (outer == "fail")


def test_alone_nothing_has_changed(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    make(policy="recompute")
    assert SAID not in caplog.text
    make(policy="fail")
    assert SAID in caplog.text


@pytest.mark.parametrize("entry", [OURS, NAMED], ids=["ours", "named"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_nixl_its_names_are_left_to_it(make: Make, entry: dict[str, Any], ours_first: bool) -> None:
    config: Any = make().config  # any that is complete
    config.kv_transfer_config = multi(*((entry, NIXL) if ours_first else (NIXL, entry)))
    registry = prometheus_client.CollectorRegistry()
    MultiConnector.build_prom_metrics(config, _types(registry), ["engine"], {0: ["0"]})
    names = [family.name for family in registry.collect()]
    assert "kvxfer_transfers" in names
    assert [names.count(f"vllm:nixl_{name}") for name in ("xfer_time_seconds", "num_failed_transfers")] == [1, 1]


def exported(make: Make, entry: dict[str, Any], store: dict[str, Any]) -> prometheus_client.CollectorRegistry:
    """What reaches `/metrics` of a decode engine that has loaded one prompt."""
    p, d = (make(transfer=multi(entry, store)) for _ in range(2))
    text = prompt(90)
    decode(d, text, prefill(p, text), p)
    registry = prometheus_client.CollectorRegistry()
    config: Any = d.scheduler.vllm_config
    metrics = MultiConnector.build_prom_metrics(config, _types(registry), ["engine"], {0: ["0"]})
    log = KVConnectorLogging(config.kv_transfer_config)
    said: list[str] = []
    for stats in crossed(d):
        metrics.observe(stats, 0)
        log.observe(stats)
    log.log(lambda form, *values: said.append(form % values))
    assert "'loads': 1" in said[0], "the log line of KV transfers"
    return registry


@pytest.mark.parametrize("entry", [OURS, NAMED], ids=["ours", "named"])
def test_nothing_is_missing_beside_a_store(make: Make, entry: dict[str, Any]) -> None:
    registry = exported(make, entry, sibling())
    assert registry.get_sample_value("kvxfer_transfers_total", {"engine": "0", "outcome": "delivered"}) == 1
    assert registry.get_sample_value("vllm:nixl_xfer_time_seconds_count", {"engine": "0"}) == 1


def test_what_rebuilds_statistics_is_known_without_the_plug_in(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """`VLLM_PLUGINS` may leave it out; a child that was asked for by its path is rebuilt by its class's name all the same."""
    assert "KVXferConnector" in KVConnectorFactory._registry
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(**NAMED))
    assert found.__name__ in KVConnectorFactory._registry
    assert KVConnectorFactory.get_connector_class_by_name(found.__name__).build_kv_connector_stats() is not None


@pytest.mark.parametrize("child", ["kv_both", "kv_consumer"])
def test_an_entry_that_loads_where_the_engine_does_not(
    make: Make, caplog: pytest.LogCaptureFixture, child: str
) -> None:
    """vLLM delays the freeing of blocks that a step still writes only where the engine is a consumer: loads would race with it."""
    p = make()
    text = prompt(90)
    d = make(transfer=multi({**OURS, "kv_role": child}, sibling(), role="kv_producer"))
    assert "kv_role" in caplog.text and "MultiConnector" in caplog.text
    name = d.add(text, prefill(p, text))
    d.run(p, until=name)
    assert d.computed[name] == 90 + 3
    p.lease_ends()


@pytest.mark.parametrize("inside", [True, False])
def test_steps_go_on_until_workers_inside_have_said_where_they_listen(make: Make, inside: bool) -> None:
    """By itself the connector hears it before the first step."""
    engine = make(transfer=multi(OURS, sibling())) if inside else make()
    side = ours(engine.scheduler.connector)._sched.side
    side._descriptors.clear()
    steps = 0
    while engine.scheduler.has_requests() and steps < 1000:
        engine.scheduler.schedule()
        steps += 1
    assert not side.ready
    assert (0 < steps <= FIRST_STEPS) if inside else steps == 0


@pytest.mark.parametrize("second", [OURS, NAMED, NESTED], ids=["ours", "named", "nested"])
def test_an_engine_has_kvxfer_once(make: Make, second: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="kvxfer stands 2 times in 'connectors' of MultiConnector"):
        make(transfer=multi(NAMED, second))


@pytest.mark.parametrize("entry", [OURS, NAMED], ids=["ours", "named"])
def test_settings_beside_the_entries_are_warned_of(
    make: Make, caplog: pytest.LogCaptureFixture, entry: dict[str, Any]
) -> None:
    """vLLM gives what stands there to no connector."""
    transfer = multi(entry, sibling())
    make(transfer=transfer)
    assert "gives to no connector" not in caplog.text
    transfer = multi(entry, sibling())
    transfer.kv_connector_extra_config.update({"backend": "zmq", "port": 5600, "theirs": 1})
    make(transfer=transfer)
    assert (
        "kv_connector_extra_config of MultiConnector has backend, port, which vLLM gives to no connector" in caplog.text
    )


@pytest.mark.parametrize("key", ["kv_load_failure_policy", "kv_buffer_device", "kv_role"])
def test_a_setting_of_vllm_s_among_ours_says_where_it_belongs(make: Make, key: str) -> None:
    astray = {**OURS, "kv_connector_extra_config": {key: "recompute"}}
    for transfer in (KVTransferConfig(**astray), multi(astray, sibling())):
        with pytest.raises(ConfigError, match=f"{key} in kv_connector_extra_config is a setting of vLLM's: move it up"):
            make(transfer=transfer)
