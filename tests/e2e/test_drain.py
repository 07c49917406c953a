"""A prefill server that gets SIGTERM: what it has promised is fetched before it ends, or fails at once and is computed elsewhere."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Cluster, Server, await_ready, connector, ended_together
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

SHUTDOWN_S = 20


def test_a_prefill_server_that_is_asked_to_stop(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    config = {"peer_timeout": 5.0}
    with ended_together() as begun:

        def start(name: str, role: str, *flags: str, **more: Any) -> Server:
            server = Forked(name, model, tmp_path, {**connector(role, config), **more}, flags)
            begun.append(server)
            return server

        patient = start("patient", "kv_producer", "--shutdown-timeout", str(SHUTDOWN_S))
        hasty = start("hasty", "kv_producer")
        decode = start("decode-recomputing", "kv_consumer", kv_load_failure_policy="recompute")
        await_ready([patient, hasty, decode], 300)

        prompt = "a prompt that outlives the server that has computed it, " * 3
        prompts = [f"{prompt}{n}" for n in range(3)]
        expected = [complete(cluster.plain, text, 8).tokens for text in prompts]
        params = [complete(patient, text, 1, PREFILL_PARAMS).kv_transfer_params for text in prompts[:2]]
        params.append(complete(hasty, prompts[2], 1, PREFILL_PARAMS).kv_transfer_params)

        before = received(decode)
        patient.ask_to_stop()
        hasty.ask_to_stop()
        time.sleep(2)
        assert complete(decode, prompts[0], 8, params[0]).tokens == expected[0]
        assert complete(decode, prompts[1], 8, params[1]).tokens == expected[1]
        found = received(decode) - before
        assert found.failed == 0 and found.tokens > 0
        assert patient.ended(SHUTDOWN_S / 2), "nothing is left to wait for"

        began = time.monotonic()
        assert complete(decode, prompts[2], 8, params[2]).tokens == expected[2]
        assert time.monotonic() - began < config["peer_timeout"] + 15
