"""What the connector refuses by name, before an engine has started."""

from __future__ import annotations

import importlib.metadata
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner
from vllm.v1.kv_cache_interface import MambaSpec

from kvxfer.cli import doctor
from kvxfer.cli.main import build
from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer.transport import registry
from kvxfer_vllm.connector import KVXferConnector
from kvxfer_vllm.migration import ConnectorConfig
from kvxfer_vllm.nixl import NixlConnector
from kvxfer_vllm.settings import groups_of, settings_of


def config(extra: dict[str, Any] | None = None, **parallel: Any) -> Any:
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **parallel,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra, kv_port=0, kv_role="kv_both"),
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )


def test_settings_are_read() -> None:
    assert settings_of(config({"backend": "cma", "lease": 7.0})).lease == 7.0


def test_prefill_context_parallelism() -> None:
    """An engine that only offers may have it, whether its ranks take turns or hold the same."""
    sizes = {"prefill_context_parallel_size": 2}
    for turns in (1, 2):
        refused = config(**sizes, decode_context_parallel_size=turns)
        refused.kv_transfer_config.is_kv_consumer = True
        with pytest.raises(ConfigError, match="does not load into an engine"):
            settings_of(refused)
        offering = config(**sizes, decode_context_parallel_size=turns)
        offering.kv_transfer_config.is_kv_consumer = False
        settings_of(offering)


def test_sleep_mode_that_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = config()
    asleep.model_config.enable_sleep_mode = True
    monkeypatch.setattr("kvxfer_vllm.internals.FOLLOWS_SLEEP", False)
    with pytest.raises(ConfigError, match="do not set --enable-sleep-mode"):
        settings_of(asleep)
    assert not KVXferConnector.supports_sleep_mode(None)
    monkeypatch.setattr("kvxfer_vllm.internals.FOLLOWS_SLEEP", True)
    settings_of(asleep)
    assert KVXferConnector.supports_sleep_mode(None)


def test_experts_that_are_returned_are_known_to_who_computes() -> None:
    returning = config()
    returning.aux_output_config = SimpleNamespace(enable_return_routed_experts=True)
    returning.kv_transfer_config.is_kv_consumer = True
    with pytest.raises(ConfigError, match="--enable-return-routed-experts"):
        settings_of(returning)
    returning.kv_transfer_config.is_kv_consumer = False
    settings_of(returning)


def test_a_mistyped_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'backend'"):
        settings_of(config({"bakend": "zmq"}))


def test_a_kind_of_cache_that_is_not_supported() -> None:
    cross = type("CrossAttentionSpec", (), {"block_size": 16})()
    group = SimpleNamespace(kv_cache_spec=cross, enable_kv_transfer=True, host_resident=False)
    with pytest.raises(ConfigError, match="group 0: it holds CrossAttentionSpec"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]), config())


def test_states_of_which_nobody_knows_where_they_are() -> None:
    state = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.int8,), mamba_cache_mode="all")
    group = SimpleNamespace(kv_cache_spec=state, enable_kv_transfer=True, host_resident=False)
    with pytest.raises(ConfigError, match="mamba_cache_mode 'all'; set --mamba-cache-mode align"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]), config())


def test_the_connector_s_own_setting_is_checked_as_the_others_are() -> None:
    assert ConnectorConfig.from_mapping({"legacy_hosts": ["10.0.0.0/8"]}).legacy_hosts == ("10.0.0.0/8",)
    with pytest.raises(ConfigError, match="'legacy_host'.*did you mean 'legacy_hosts'"):
        ConnectorConfig.from_mapping({"legacy_host": []})
    with pytest.raises(ConfigError, match="unknown kvxfer setting 'legacy_hosts'"):
        Config.from_mapping({"legacy_hosts": []})


def test_settings_of_nixls_bidirectional_mode() -> None:
    """Under its name they are taken; nothing is kept unless that is said."""
    assert settings_of(config(), NixlConnector._translate).keep_answers == 0
    theirs = {"bidirectional_kv_xfer": False, "kv_recompute_threshold": 128, "decoder_kv_blocks_ttl": 60}
    found = settings_of(config(theirs), NixlConnector._translate)
    assert (found.decode_answers, found.ask_tokens, found.keep_answers) == (False, 128, 60.0)
    assert settings_of(config({"kv_recompute_threshold": 0}), NixlConnector._translate).ask_tokens == 1
    assert settings_of(config({**theirs, "ask_tokens": 7}), NixlConnector._translate).ask_tokens == 7


@pytest.mark.parametrize(("ports", "said"), [(["5600"], False), ([5600, 5601], False), (["23280"], True), (None, True)])
def test_what_dynamo_is_told_of_an_engine(ports: Any, said: bool, caplog: pytest.LogCaptureFixture) -> None:
    tier = {"router_capabilities": ["router_hint"], "control_advertise_host": "worker-a", "control_ports": ports}
    assert settings_of(config({"port": 5600, "secondary_tiers": [tier]})).port == 5600
    assert ("Dynamo's router is told to ask this engine" in caplog.text) == said


def test_doctor_reads_the_settings_of_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(load=lambda: ConnectorConfig)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "kvxfer.settings" else [])
    read = doctor.read_settings('{"legacy_hosts": ["10.0.0.0/8"], "port": 7}')
    assert isinstance(read, ConnectorConfig) and read.port == 7
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        doctor.read_settings('{"ports": 7}')
    with pytest.raises(ConfigError, match="'ports'.*did you mean 'port'"):
        doctor.read_settings('{"legacy_hosts": ["10.0.0.0/8"], "ports": 7}')


def test_vllms_option_without_settings_of_ours() -> None:
    """With defaults alone, or as it is for another connector."""
    assert ConnectorConfig.unwrapped({"kv_connector": "KVXferConnector", "kv_role": "kv_both"}) == {}
    with pytest.raises(ConfigError, match="'kv_connector' is 'NixlConnector'; kvxfer's is 'KVXferConnector'"):
        ConnectorConfig.unwrapped({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    with pytest.raises(ConfigError, match="must be an object, not 'tcp'"):
        ConnectorConfig.unwrapped({"kv_connector": "KVXferConnector", "kv_connector_extra_config": "tcp"})


def test_doctor_takes_vllms_option_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """And finds all that kvxfer touches of the vLLM that is here."""
    tcp = {"tcp": registry.available()["tcp"]}
    monkeypatch.setattr(registry, "available", lambda: tcp)
    ours = {
        "kv_connector": "KVXferConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"listen": "127.0.0.5"},
    }
    store = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [store, ours]}}
    told = CliRunner().invoke(build(), ["doctor", "--json", "--config", json.dumps({**both, "kv_role": "kv_both"})])
    report = json.loads(told.stdout)
    assert (told.exit_code, report["problems"], report["address"]) == (0, [], "127.0.0.5")


@pytest.mark.parametrize("asked", ["as arguments are read", "before weights are loaded", "as a side is made"])
def test_a_back_end_that_is_not_installed_is_found_at_once(asked: str) -> None:
    extra = {"backend": "nixel"}
    with pytest.raises(ConfigError, match="unknown back end 'nixel'; did you mean 'nixl'"):
        match asked:
            case "as arguments are read":
                KVXferConnector.requires_piecewise_for_cudagraph(extra)
            case "before weights are loaded":
                KVXferConnector.get_required_kvcache_layout(config(extra))
            case _:
                settings_of(config(extra))


def test_a_back_end_that_is_there_is_no_question() -> None:
    for extra in ({}, {"backend": "auto"}, {"backend": "tcp"}, {"backend": "kvxfer.testing.fake:FakeTransport"}):
        assert KVXferConnector.requires_piecewise_for_cudagraph(extra) is False
        assert KVXferConnector.get_required_kvcache_layout(config(extra)) is None
