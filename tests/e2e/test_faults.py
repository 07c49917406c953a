"""What must go wrong does, visibly: a spoilt cache changes the output, and a dead prefill server costs its requests
and nothing else."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import build
from kvxfer_vllm.demo import servers
from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, Server, ServerError, await_ready, connector, ended_together
from tests.conftest import require
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


@pytest.mark.slow
def test_the_demo_fails_if_a_block_of_one_layer_is_zeroed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of all other tests here: they compare tokens, and tokens do depend on the cache."""
    require("vllm")
    monkeypatch.setattr(servers, "running", partial(servers.running, kind=Forked))
    words = ["demo", "--json", "--backend", "kvxfer.testing.faults:Zeroing", "--keep-logs", str(tmp_path)]
    result = CliRunner().invoke(build(), words)
    assert result.exit_code == 1, result.stderr
    report = json.loads(result.stdout)
    assert not report["tokens_identical"]
    assert report["kv_bytes"] > 0 and report["external_kv_tokens"] > 0
    assert any("differs" in objection for objection in report["objections"])
    assert {log.name for log in tmp_path.iterdir()} == {"plain.log", "prefill.log", "decode.log"}


DEADLINE_S = 15.0  # with a dozen processes on two cores, a thread that may run has been seen to wait for seconds


def test_a_killed_prefill_server_costs_only_its_requests(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Killed while its KV is on the way: both policies answer in time, later requests for what it held fare alike, and its
    successor is found without a restart of the decode servers."""
    config = {"transfer_timeout": DEADLINE_S, "peer_timeout": 5.0, "backend": "kvxfer.testing.faults:Faulty"}
    config["backend_options"] = {"inner": "zmq"}  # in which the producer takes part, so that its delay counts
    slow = {**config, "backend_options": {"inner": "zmq", "delay_s": 300.0}}
    with ended_together() as begun:

        def start(name: str, role: str, config: dict[str, Any], **policy: str) -> Server:
            server = Forked(name, model, tmp_path, {**connector(role, config), **policy})
            begun.append(server)
            return server

        mortal = start("mortal", "kv_producer", slow)
        failing = start("failing", "kv_consumer", config, kv_load_failure_policy="fail")
        recomputing = start("recomputing", "kv_consumer", config, kv_load_failure_policy="recompute")
        await_ready([mortal, failing, recomputing], 300)

        prompt = "this prompt outlives the server that computed it, " * 3
        prompts = [f"{prompt}{n}" for n in range(4)]
        expected = [complete(cluster.plain, text, 16).tokens for text in prompts]
        offers = [complete(mortal, text, 1, PREFILL_PARAMS).kv_transfer_params for text in prompts]

        def ask(server: Server, n: int) -> tuple[list[int] | ServerError, float]:
            try:
                return complete(server, prompts[n], 16, offers[n]).tokens, time.monotonic()
            except ServerError as error:
                return error, time.monotonic()

        with ThreadPoolExecutor(2) as clients:
            asked = [clients.submit(ask, server, n) for n, server in enumerate((failing, recomputing))]
            time.sleep(1.5)
            assert not any(answer.done() for answer in asked), "nothing was on its way when the server was killed"
            mortal.kill()
            killed = time.monotonic()
            (failed, failed_at), (recomputed, recomputed_at) = (answer.result() for answer in asked)
        assert isinstance(failed, ServerError) and "answered 500" in str(failed)  # and did not go on with wrong bytes
        assert recomputed == expected[1]
        assert max(failed_at, recomputed_at) - killed < 2 * DEADLINE_S

        dead, _ = ask(failing, 2)
        assert isinstance(dead, ServerError) and "answered 500" in str(dead)
        assert ask(recomputing, 3)[0] == expected[3]

        successor = start("successor", "kv_producer", config)
        await_ready([successor], 300)
        for server, n in ((failing, 0), (recomputing, 2)):
            before = received(server)
            assert prefill_then_decode(successor, server, prompts[n], 16).tokens == expected[n]
            assert (received(server) - before).tokens > 0
