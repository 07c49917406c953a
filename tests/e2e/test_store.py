"""Real servers beside a store: kvxfer and vLLM's OffloadingConnector in one MultiConnector, in either order and under either name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvxfer_vllm.demo.metrics import loaded_tokens, total
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import BLOCK, Cluster, Server, await_ready, ended_together
from tests.conftest import require
from tests.e2e.conftest import PATIENT, first_of
from tests.e2e.forked import Forked
from tests.e2e.host_offload import OFFLOADING

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(540)]

STARTED: type[Server] = Server if torch.cuda.is_available() else Forked
"""A process that has imported vLLM for a GPU cannot be forked."""

OURS = {"kv_connector": "KVXferConnector"}
NAMED = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvxfer_vllm.nixl"}


def config(role: str, name: dict[str, Any], ours_first: bool) -> dict[str, Any]:
    ours = {**name, "kv_role": "kv_both", "kv_connector_extra_config": PATIENT}
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, OFFLOADING] if ours_first else [OFFLOADING, ours]},
    }


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Server]:
    require("vllm")
    if STARTED is Forked:
        yield request.getfixturevalue("cluster").plain
        return
    with ended_together() as begun:
        begun.append(STARTED("plain", model, tmp_path_factory.mktemp("logs")))
        await_ready(begun, 300.0)
        yield begun[0]


@pytest.fixture(
    scope="module", params=first_of([(NAMED, True), (OURS, False)]), ids=["NixlConnector first", "kvxfer last"]
)
def servers(
    request: pytest.FixtureRequest, model: Path, plain: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Cluster, bool]]:
    logs, (name, ours_first) = tmp_path_factory.mktemp("logs"), request.param
    with ended_together() as begun:
        for side in ("prefill", "decode"):
            settings = config(side, name, ours_first)
            begun.append(STARTED(side, model, logs, settings, env={"VLLM_SERVER_DEV_MODE": "1"}))
        await_ready(begun, 300.0)
        yield Cluster(plain, *begun), ours_first


def text(n: int, blocks: int) -> str:
    return f"prompt {n}: " + "".join(chr(97 + (n * 31 + i * i) % 26) for i in range(blocks * BLOCK))


def requests(server: Server, outcome: str) -> float:
    return sum(
        float(line.rpartition(" ")[2])
        for line in server.metrics().splitlines()
        if line.startswith("kvxfer_requests_total") and f'outcome="{outcome}"' in line
    )


def test_tokens_are_right_and_told_where_they_came_from(servers: tuple[Cluster, bool]) -> None:
    cluster, ours_first = servers
    prompts = [text(n, 2 + n % 4) for n in range(6)]
    expected = [complete(cluster.plain, prompt, 16).tokens for prompt in prompts]
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert prefill_then_decode(cluster.prefill, cluster.decode, prompt, 16).tokens == tokens
    assert requests(cluster.decode, "delivered") == len(prompts)

    # The metrics of a decode engine, whatever name the connector was asked for by: none is missing, and the log has its line.
    assert total(cluster.decode, "kvxfer_kv_bytes_total") > 0
    assert total(cluster.decode, "kvxfer_transfers_total") == len(prompts)
    assert total(cluster.decode, "vllm:nixl_bytes_transferred_count") == len(prompts)
    assert total(cluster.decode, "vllm:nixl_xfer_time_seconds_count") == len(prompts)
    assert total(cluster.decode, "vllm:nixl_num_failed_transfers_total") == 0

    # What the cache forgets the store has. P is asked all the same, as a router does.
    cluster.decode.post("/reset_prefix_cache", {})
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert prefill_then_decode(cluster.prefill, cluster.decode, prompt, 16).tokens == tokens
    assert requests(cluster.decode, "delivered" if ours_first else "elsewhere") == len(prompts) * (1 + ours_first)
    assert total(cluster.decode, "kvxfer_transfers_total") == len(prompts) * (1 + ours_first), "moved in vain"

    # Without P the store brings it, wherever it stands.
    cluster.decode.post("/reset_prefix_cache", {})
    before = loaded_tokens(cluster.decode)
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert complete(cluster.decode, prompt, 16).tokens == tokens
    assert loaded_tokens(cluster.decode) - before >= len(prompts) * 2 * BLOCK
    complete(cluster.prefill, "a step", 1)
    assert total(cluster.prefill, "kvxfer_offers_in_hand") == 0
    for server in (cluster.prefill, cluster.decode):
        log = server.log.read_text()
        assert "kv_load_failure_policy is 'fail'" not in log and "Traceback" not in log
        assert ("Put kvxfer first" in log) != ours_first
