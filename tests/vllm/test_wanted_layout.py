"""Which memory layout the connector asks vLLM for, and when it leaves the choice to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.platforms import current_platform
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvxfer.errors import ConfigError
from kvxfer_vllm.connector import KVXferConnector
from kvxfer_vllm.migration import ConnectorConfig
from kvxfer_vllm.settings import BLOCKS_OUTERMOST


def config(extra: dict[str, Any] | None = None, **model: bool) -> Any:
    named = {"kv_connector": "KVXferConnector", "kv_connector_module_path": "kvxfer_vllm", "kv_role": "kv_both"}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra or {}, **named),
        model_config=SimpleNamespace(**({"use_mla": False, "is_hybrid": False} | model)),
        cache_config=SimpleNamespace(kv_cache_layout=None),
    )


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)


def asked(*args: Any, **kwargs: Any) -> str | None:
    return KVXferConnector.get_required_kvcache_layout(config(*args, **kwargs))


def test_blocks_are_asked_for_outermost_and_each_is_one_run(on_cuda: None) -> None:
    assert asked() == BLOCKS_OUTERMOST
    layout = KVCacheLayout[BLOCKS_OUTERMOST]
    assert layout.is_block_outermost and layout.is_block_compact and layout.is_block_contiguous


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("why", ["use_mla", "is_hybrid"])
def test_models_with_pages_of_other_kinds_are_left_to_vllm(why: str) -> None:
    assert asked(**{why: True}) is None


def test_other_devices_are_left_to_vllm_which_would_warn() -> None:
    assert not current_platform.is_cuda() and asked() is None


@pytest.mark.usefixtures("on_cuda")
def test_an_operator_may_leave_the_choice_to_vllm() -> None:
    assert asked({"blocks_outermost": False}) is None and asked({"blocks_outermost": True}) == BLOCKS_OUTERMOST
    assert ConnectorConfig.from_mapping({}).blocks_outermost
    with pytest.raises(ConfigError, match="blocks_outermost"):
        ConnectorConfig.from_mapping({"blocks_outermost": "no"})


@pytest.mark.usefixtures("on_cuda")
def test_kvcached_lays_the_cache_out_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_KVCACHED", "true")
    assert asked() is None


@pytest.mark.usefixtures("on_cuda")
def test_inside_multi_connector_siblings_may_ask_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    outer = config()
    sibling = SimpleNamespace(get_required_kvcache_layout=lambda vllm_config: "LBHNC")
    classes = [(KVXferConnector, config()), (sibling, config())]
    monkeypatch.setattr(MultiConnector, "_get_connector_classes_and_configs", lambda vllm_config: classes)
    assert MultiConnector.get_required_kvcache_layout(outer) == "LBHNC"


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize(
    ("requested", "candidates", "found"),
    [
        (None, ["LBNHC", "LBHNC", "BLHNC"], "BLHNC"),
        (None, ["LBNHC"], "LBNHC"),
        ("LBHNC", ["LBNHC", "LBHNC", "BLHNC"], "LBHNC"),
    ],
    ids=["the back end has it", "the back end has it not", "the operator has chosen"],
)
def test_vllm_takes_it_as_a_preference(
    requested: str | None, candidates: list[str], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(utils, "envs", SimpleNamespace(VLLM_KV_CACHE_LAYOUT=requested))
    assert utils.resolve_kv_cache_layout(config(), [candidates]).name == found
