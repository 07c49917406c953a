"""What the connector refuses by name, before an engine has started."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from kvxfer.cli import doctor
from kvxfer.config import Config
from kvxfer.errors import ConfigError
from kvxfer_vllm.connector import KVXferConnector
from kvxfer_vllm.migration import ConnectorConfig
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


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_parallelism_that_is_not_supported(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} to 1"):
        settings_of(config(**{name: 2}))


def test_sleep_mode_that_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asleep = config()
    asleep.model_config.enable_sleep_mode = True
    monkeypatch.setattr("kvxfer_vllm.compat.FOLLOWS_SLEEP", False)
    with pytest.raises(ConfigError, match="do not set --enable-sleep-mode"):
        settings_of(asleep)
    assert not KVXferConnector.supports_sleep_mode(None)
    monkeypatch.setattr("kvxfer_vllm.compat.FOLLOWS_SLEEP", True)
    settings_of(asleep)
    assert KVXferConnector.supports_sleep_mode(None)


def test_a_mistyped_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'backend'"):
        settings_of(config({"bakend": "zmq"}))


def test_a_kind_of_cache_that_is_not_supported() -> None:
    cross = type("CrossAttentionSpec", (), {"block_size": 16})()
    group = SimpleNamespace(kv_cache_spec=cross, enable_kv_transfer=True, host_resident=False)
    with pytest.raises(ConfigError, match="group 0: it holds CrossAttentionSpec"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]))


def test_states_of_which_nobody_knows_where_they_are() -> None:
    state = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.int8,), mamba_cache_mode="all")
    group = SimpleNamespace(kv_cache_spec=state, enable_kv_transfer=True, host_resident=False)
    with pytest.raises(ConfigError, match="mamba_cache_mode 'all'; set --mamba-cache-mode align"):
        groups_of(SimpleNamespace(kv_cache_groups=[group]))


def test_the_connector_s_own_setting_is_checked_as_the_others_are() -> None:
    assert ConnectorConfig.from_mapping({"legacy_hosts": ["10.0.0.0/8"]}).legacy_hosts == ("10.0.0.0/8",)
    with pytest.raises(ConfigError, match="'legacy_host'.*did you mean 'legacy_hosts'"):
        ConnectorConfig.from_mapping({"legacy_host": []})
    with pytest.raises(ConfigError, match="unknown kvxfer setting 'legacy_hosts'"):
        Config.from_mapping({"legacy_hosts": []})


def test_doctor_reads_the_settings_of_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [SimpleNamespace(load=lambda: ConnectorConfig)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "kvxfer.settings" else [])
    read = doctor._settings('{"legacy_hosts": ["10.0.0.0/8"], "port": 7}')
    assert isinstance(read, ConnectorConfig) and read.port == 7
    with pytest.raises(ConfigError, match="did you mean 'port'"):
        doctor._settings('{"ports": 7}')
    with pytest.raises(ConfigError, match="'ports'.*did you mean 'port'"):
        doctor._settings('{"legacy_hosts": ["10.0.0.0/8"], "ports": 7}')
