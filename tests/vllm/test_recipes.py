"""The configurations of the pages on recipes and on stores: vLLM takes each as it stands, and KV moves under it."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CacheConfig, KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import kvxfer_vllm as plugin
from kvxfer.errors import ConfigError
from kvxfer_vllm import KVXferConnector, register
from kvxfer_vllm.migration import ConnectorConfig, located
from tests.ports import free_ports
from tests.vllm.cases import check, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.store import attach

DOCS = Path(__file__).parents[2] / "docs"
FOUND = [
    (page, json.loads(text))
    for page in ("recipes",)
    for text in re.findall(r"```json\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.S)
]
EACH = pytest.mark.parametrize(
    "recipe", [one for _, one in FOUND], ids=[f"{page} {i}" for i, (page, _) in enumerate(FOUND)]
)
STORES = ("OffloadingConnector", "SimpleCPUOffloadConnector", "MooncakeStoreConnector")


def entries(recipe: dict[str, Any]) -> list[dict[str, Any]]:
    return list(recipe.get("kv_connector_extra_config", {}).get("connectors", [recipe]))


def ours(entry: dict[str, Any]) -> bool:
    return entry["kv_connector"] not in STORES


def test_there_are_some_of_each_kind() -> None:
    assert len(FOUND) > 9 and {len(entries(recipe)) for _, recipe in FOUND} == {1, 2}


@EACH
def test_vllm_takes_it(recipe: dict[str, Any]) -> None:
    register()  # as vLLM has its plug-ins do
    transfer = KVTransferConfig(**recipe)
    assert not transfer.is_kv_consumer or transfer.kv_load_failure_policy == "recompute"
    first, *others = entries(recipe)
    assert issubclass(KVConnectorFactory.get_connector_class(KVTransferConfig(**first)), KVXferConnector), (
        "kvxfer is first"
    )
    for store in others:
        assert store["kv_connector"] in KVConnectorFactory._registry


def playable(recipe: dict[str, Any]) -> KVTransferConfig:
    """The recipe with a port that is free, without what must be found on a GPU or a disk, and a stand-in for its store."""
    recipe = copy.deepcopy(recipe)
    found = entries(recipe)
    for i, entry in enumerate(found):
        extra = entry.get("kv_connector_extra_config", {})
        if ours(entry):
            extra.pop("backend", None)
            if "port" in extra:
                extra["port"] = free_ports(1)
        else:
            found[i] = {
                "kv_connector": "Store",
                "kv_connector_module_path": "tests.vllm.store",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"load_async": bool(extra.get("load_async"))},
            }
    if len(found) > 1:
        recipe["kv_connector_extra_config"]["connectors"] = found
    return KVTransferConfig(**recipe)


@EACH
def test_kv_moves(make: Make, recipe: dict[str, Any]) -> None:
    register()
    p, d = engine(make, recipe, "kv_producer"), engine(make, recipe, "kv_consumer")
    text = prompt(90)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3
    if len(entries(recipe)) > 1:
        d.steps(4)
        assert d.scheduler.reset_prefix_cache()
        name = d.add(text)
        d.run(p, until=name)
        check(d, name, text)
        assert d.computed[name] < 16 + 4, "the store brings it"


def engine(make: Make, recipe: dict[str, Any], other: str) -> PlayedEngine:
    """An engine by the recipe, or, where that is of one role, of the role that its counterpart has."""
    if recipe["kv_role"] not in ("kv_both", other):
        recipe = {**recipe, "kv_role": other, "kv_load_failure_policy": "recompute"}
    out = make(transfer=playable(recipe))
    attach(out)
    return out


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector", "NixlPushConnector"])
def test_every_name_of_nixl_s_connectors(name: str) -> None:
    transfer = KVTransferConfig(kv_connector=name, kv_connector_module_path="kvxfer_vllm.nixl", kv_role="kv_both")
    assert issubclass(KVConnectorFactory.get_connector_class(transfer), KVXferConnector)


def test_the_port_of_a_wide_pod() -> None:
    """The first rank of a pod listens on the base port."""
    start, base = 8, 5600
    config = ConnectorConfig(port=base - start, listen="127.0.0.1")
    assert [located(config, SimpleNamespace(data_parallel_index=start + i)).port for i in range(3)] == [
        5600,
        5601,
        5602,
    ]
    with pytest.raises(ConfigError):
        located(ConnectorConfig(port=65535), SimpleNamespace(data_parallel_index=1))


@pytest.mark.parametrize(
    ("command", "warned"),
    [
        (["serve", "--kv-offloading-size", "4", "--kv-transfer-config", '{"kv_connector":"KVXferConnector"}'], True),
        (
            [
                "serve",
                "--kv_offloading_size=4",
                "--kv-transfer-config",
                '{"kv_connector_module_path":"kvxfer_vllm.nixl"}',
            ],
            True,
        ),
        (["serve", "--kv-transfer-config", '{"kv_connector":"KVXferConnector"}'], False),
        (["serve", "--kv-offloading-size", "4"], False),
    ],
)
def test_offloading_by_a_flag_is_warned_of(caplog: pytest.LogCaptureFixture, command: list[str], warned: bool) -> None:
    plugin._warn_if_replaced(command)
    assert ("kvxfer is not used" in caplog.text) == warned


def test_offloading_by_a_flag_beside_our_path_says_why_it_does_not_start(make: Make) -> None:
    """vLLM leaves the path where it is, and looks there for the connector that it has put in the place of ours."""
    transfer = KVTransferConfig(
        kv_connector="KVXferConnector", kv_connector_module_path="kvxfer_vllm", kv_role="kv_both"
    )
    config: Any = SimpleNamespace(
        cache_config=CacheConfig(block_size=16, kv_offloading_size=1.0), kv_transfer_config=transfer
    )
    VllmConfig._post_init_kv_transfer_config(config)
    assert transfer.kv_connector == "OffloadingConnector"
    with pytest.raises(AttributeError) as caught:
        KVConnectorFactory.get_connector_class(transfer)
    assert "--kv-offloading-size" in str(caught.value.__cause__)
