"""What must go wrong does, visibly: a spoilt cache changes the output, a dead prefill server costs its requests and nothing else,
and one that is asked to stop keeps what it has promised."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
SHUTDOWN_S = 120
OVER_ZMQ = {"inner": "zmq"}
"""In which the producer takes part, so that its delay counts."""
CONFIG: dict[str, Any] = {
    "transfer_timeout": DEADLINE_S,
    "peer_timeout": 5.0,
    "backend": "kvxfer.testing.faults:Faulty",
    "backend_options": OVER_ZMQ,
}
SLOW = {**CONFIG, "backend_options": {**OVER_ZMQ, "delay_s": 300.0}}


@dataclass(frozen=True)
class Servers:
    """Of those that prefill ``mortal`` delays its KV without end, and ``patient`` has time to shut down; of those that decode each
    has a policy of what becomes of requests whose loads fail."""

    mortal: Server
    patient: Server
    hasty: Server
    failing: Server
    recomputing: Server


@pytest.fixture(scope="module")
def at(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    logs = tmp_path_factory.mktemp("faults")
    with ended_together() as begun:

        def start(name: str, role: str, config: dict[str, Any], *flags: str, **policy: str) -> Server:
            begun.append(Forked(name, model, logs, {**connector(role, config), **policy}, flags))
            return begun[-1]

        started = Servers(
            mortal=start("mortal", "kv_producer", SLOW),
            patient=start("patient", "kv_producer", CONFIG, "--shutdown-timeout", str(SHUTDOWN_S)),
            hasty=start("hasty", "kv_producer", CONFIG),
            failing=start("failing", "kv_consumer", CONFIG, kv_load_failure_policy="fail"),
            recomputing=start("recomputing", "kv_consumer", CONFIG, kv_load_failure_policy="recompute"),
        )
        await_ready(begun, 300)
        yield started


def test_a_killed_prefill_server_costs_only_its_requests(cluster: Cluster, at: Servers) -> None:
    """Killed while its KV is on the way: both policies answer in time, later requests for what it held fare alike, and another
    is found without a restart of the decode servers."""
    prompt = "this prompt outlives the server that computed it, " * 3
    prompts = [f"{prompt}{n}" for n in range(4)]
    expected = [complete(cluster.plain, text, 16).tokens for text in prompts]
    offers = [complete(at.mortal, text, 1, PREFILL_PARAMS).kv_transfer_params for text in prompts]

    def ask(server: Server, n: int) -> tuple[list[int] | ServerError, float]:
        try:
            return complete(server, prompts[n], 16, offers[n]).tokens, time.monotonic()
        except ServerError as error:
            return error, time.monotonic()

    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(ask, server, n) for n, server in enumerate((at.failing, at.recomputing))]
        time.sleep(1.5)
        assert not any(answer.done() for answer in asked), "nothing was on its way when the server was killed"
        at.mortal.kill()
        killed = time.monotonic()
        (failed, failed_at), (recomputed, recomputed_at) = (answer.result() for answer in asked)
    assert isinstance(failed, ServerError) and "answered 500" in str(failed)  # and did not go on with wrong bytes
    assert recomputed == expected[1]
    assert max(failed_at, recomputed_at) - killed < 2 * DEADLINE_S

    dead, _ = ask(at.failing, 2)
    assert isinstance(dead, ServerError) and "answered 500" in str(dead)
    assert ask(at.recomputing, 3)[0] == expected[3]

    for server, n in ((at.failing, 0), (at.recomputing, 2)):
        before = received(server)
        assert prefill_then_decode(at.patient, server, prompts[n], 16).tokens == expected[n]
        assert (received(server) - before).tokens > 0


def test_a_prefill_server_that_is_asked_to_stop(cluster: Cluster, at: Servers) -> None:
    """It gets SIGTERM: what it has promised is fetched before it ends, or fails at once and is computed elsewhere.

    The last test of this module: these servers are gone then.
    """
    prompt = "a prompt that outlives the server that has computed it, " * 3
    prompts = [f"{prompt}{n}" for n in range(3)]
    expected = [complete(cluster.plain, text, 8).tokens for text in prompts]
    params = [complete(at.patient, text, 1, PREFILL_PARAMS).kv_transfer_params for text in prompts[:2]]
    params.append(complete(at.hasty, prompts[2], 1, PREFILL_PARAMS).kv_transfer_params)

    before = received(at.recomputing)
    at.patient.ask_to_stop()
    at.hasty.ask_to_stop()
    time.sleep(2)
    assert complete(at.recomputing, prompts[0], 8, params[0]).tokens == expected[0]
    assert complete(at.recomputing, prompts[1], 8, params[1]).tokens == expected[1]
    found = received(at.recomputing) - before
    assert found.failed == 0 and found.tokens > 0
    assert at.patient.ended(SHUTDOWN_S / 2), "nothing is left to wait for"

    began = time.monotonic()
    assert complete(at.recomputing, prompts[2], 8, params[2]).tokens == expected[2]
    assert time.monotonic() - began < CONFIG["peer_timeout"] + 40
