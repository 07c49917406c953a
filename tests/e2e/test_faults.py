"""What must go wrong does, visibly: a spoilt cache changes the output, and a dead prefill server costs its requests
and nothing else."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Cluster, Server, ServerError, await_ready, connector
from tests.conftest import require
from tests.e2e.test_demo import demo

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


def test_the_demo_fails_if_a_block_of_one_layer_is_zeroed(tmp_path: Path) -> None:
    """The negative control of all other tests here: they compare tokens, and tokens do depend on the cache."""
    require("vllm")
    result = demo("--backend", "kvxfer.testing.faults:Zeroing", "--keep-logs", str(tmp_path))
    assert result.returncode == 1, result.stderr
    report = json.loads(result.stdout)
    assert not report["tokens_identical"]
    assert report["kv_bytes"] > 0 and report["external_kv_tokens"] > 0
    assert any("differs" in objection for objection in report["objections"])
    assert {log.name for log in tmp_path.iterdir()} == {"plain.log", "prefill.log", "decode.log"}


def test_a_dead_prefill_server_costs_only_its_requests(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = {"backend": "zmq", "transfer_timeout": 5.0, "peer_timeout": 2.0}
    with ExitStack() as stack:

        def start(name: str, role: str, **policy: str) -> Server:
            server = Server(name, model, tmp_path, {**connector(role, config), **policy})
            stack.callback(server.stop)
            return server

        prefill = start("mortal", "kv_producer")
        failing = start("failing", "kv_consumer", kv_load_failure_policy="fail")
        recomputing = start("recomputing", "kv_consumer", kv_load_failure_policy="recompute")
        await_ready([prefill, failing, recomputing], 300)

        prompt = "this prompt outlives the server that computed it, " * 3
        expected = complete(cluster.plain, prompt, 16).tokens
        offers = [complete(prefill, f"{prompt}{n}", 1, PREFILL_PARAMS).kv_transfer_params for n in range(2)]
        prefill.stop()

        with pytest.raises(ServerError, match="answered 500"):  # and neither hung nor went on with wrong bytes
            complete(failing, f"{prompt}0", 16, offers[0])
        recomputed = complete(recomputing, f"{prompt}1", 16, offers[1])
        assert recomputed.tokens == complete(cluster.plain, f"{prompt}1", 16).tokens

        for server in (failing, recomputing):
            assert complete(server, prompt, 16).tokens == expected, "goes on serving"
