"""``kvxfer bench fleet-ray``: prefill and decode replicas of Ray Serve LLM, used by the stock OpenAI client.

Ray Serve runs the engines, with kvxfer registered so that a request goes to both sides at once (``kvxfer_vllm.ray``). Under the load of
the clients Serve starts a second decode replica; then the first is killed, and Serve starts another. Ends with one line of JSON,
and exits 1 unless every request had the plain server's tokens and both replicas that joined have decoded from KV that came.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from kvxfer.cli.terminal import Say
from kvxfer_bench.options import Backend, KeepLogs, Requests
from kvxfer_bench.vllm.clients import Clients, Wish, expectations, reported, wishes
from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.servers import ENGINE, ENVIRONMENT, MODEL_NAME, ServerError, connector, free_port

START_S = JOIN_S = 600.0
AGAIN = 10
"""How often a client asks again: what the replica that is killed has in hand, until Serve has noticed."""
AMID, AMID_S = 20 * Clients.COUNT, 60.0
"""The longest requests, and the seconds, among which a decode replica has some in hand."""
DECODE = f"SERVE_REPLICA::default#Decode:{MODEL_NAME}#"
LOADED = re.compile(
    r'^ray_vllm_prompt_tokens_by_source_total\{.*ReplicaId="(?P<replica>\w+)".*source="external_kv_transfer".*\} '
    r"(?P<tokens>[1-9]\S*)",
    re.MULTILINE,
)
"""A line of Ray's page of metrics: the prompt tokens whose KV came to a replica from outside, if any did."""


def fleet_ray(requests: Requests = 200, backend: Backend = "tcp", keep_logs: KeepLogs = None) -> None:
    """Send mixed requests to Ray Serve LLM while it scales decode replicas from one to two and replaces one that is killed.

    Prints one JSON object at the end. Exits with 1 if a request did not get a plain server's tokens, or anything else went wrong.
    """
    if importlib.util.find_spec("ray") is None:
        raise typer.BadParameter(
            "Ray is not installed here; make fleet-ray builds an environment with it", param_hint="ray"
        )
    with tempfile.TemporaryDirectory(prefix="kvxfer-ray-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_model(folder / "model")
        try:
            reported(requests, lambda say: _run(folder, backend, requests, say))
        finally:
            if keep_logs is not None and (logs := folder / "ray" / "session_latest" / "logs").is_dir():
                shutil.copytree(logs, keep_logs, dirs_exist_ok=True)


def _run(folder: Path, backend: str, requests: int, say: Say) -> dict[str, Any]:
    wanted = wishes(requests)
    expected = expectations(folder / "model", folder, wanted)
    say("the plain server has answered all prompts")
    with _serving(folder, backend, say) as url, Clients(url, expected, AGAIN) as clients:
        return _go_through(clients, wanted, requests, say)


@contextmanager
def _serving(folder: Path, backend: str, say: Say) -> Iterator[str]:
    """Have a Ray cluster of this process alone serve the model with one replica of each kind, and yield the application's URL.

    Raises:
        ServerError: The replicas did not start.
    """
    # Ray reads these when it is imported; its processes have them from this one.
    os.environ |= {**ENVIRONMENT, "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray
    from ray import serve
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory
    from ray.serve.llm import build_pd_openai_app

    port = free_port()
    # Processors are shared: what Ray counts is not what engines of this size take.
    ray.init(
        num_cpus=32,
        include_dashboard=False,
        object_store_memory=200 << 20,
        _temp_dir=str(folder / "ray"),
        log_to_driver=False,
        configure_logging=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        KVConnectorBackendFactory.register_backend("KVXferConnector", "kvxfer_vllm.ray:KVXferBackend")
        app = build_pd_openai_app(
            {
                "prefill_config": _side("kv_producer", folder / "model", {"backend": backend, "port": free_port()}, 1),
                "decode_config": _side("kv_consumer", folder / "model", {"backend": backend}, 2),
            }
        )
        serve.run_many(
            [serve.RunTarget(app)], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False
        )
        _await_running()
        say("a replica of each kind answers")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _await_running() -> None:
    from ray import serve

    deadline = time.monotonic() + START_S
    while (found := serve.status().applications.get("default")) is None or found.status != "RUNNING":
        if time.monotonic() > deadline or (found and found.status == "DEPLOY_FAILED"):
            said = f"{found.status}: {found.message}" if found else "nothing"
            raise ServerError(f"Ray Serve did not start the replicas; its status is {said}")
        time.sleep(1.0)


def _side(role: str, model: Path, settings: dict[str, Any], most: int) -> dict[str, Any]:
    """Return what Ray is told of prefill or decode replicas: one to begin with, at most ``most`` under load."""
    return {
        "model_loading_config": {"model_id": MODEL_NAME, "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {
            "autoscaling_config": {
                "min_replicas": 1,
                "max_replicas": most,
                "target_ongoing_requests": 0.5,
                "metrics_interval_s": 1.0,
                "look_back_period_s": 5.0,
                "upscale_delay_s": 2.0,
                "downscale_delay_s": 3600.0,
            },
            # Beside engines that start, one that is well may take long to say so.
            "health_check_timeout_s": 120.0,
        },
        "engine_kwargs": {
            **ENGINE,
            "kv_transfer_config": {**connector(role, settings), "kv_load_failure_policy": "recompute"},
        },
    }


def _go_through(clients: Clients, wanted: Sequence[Wish], requests: int, say: Say) -> dict[str, Any]:
    """Have clients go on, with at least this many requests, while replicas come and go; return the report.

    Raises:
        ServerError: A replica did not come.
    """
    answers, more, loads = clients.answers, itertools.cycle(wanted), dict[str, int]()

    def seen() -> int:
        """Return how many decode replicas have been given KV, those included that are gone."""
        loads.update(_loaded())
        return len(loads)

    def until(came: Callable[[], bool], what: str) -> None:
        """Have the clients make requests until something has come about."""
        deadline = time.monotonic() + JOIN_S
        while not came():
            if time.monotonic() > deadline:
                raise ServerError(f"not within {JOIN_S:g} s: {what}")
            if not clients.waiting:
                clients.send(itertools.islice(more, Clients.COUNT))
            time.sleep(0.5)
        say(f"after {answers.done} requests: {what}")

    (first,) = _replicas()  # Serve is to find the others necessary
    until(lambda: seen() > 1, "a second decode replica has been given KV")
    before, most = len(loads), max(wish.tokens for wish in wanted)
    longest = itertools.cycle([wish for wish in wanted if wish.tokens == most])
    clients.send(itertools.islice(longest, AMID))
    amid = _kill_amid(first)
    say(f"after {answers.done} requests: killed the first decode replica, which had {amid} in hand")
    until(lambda: seen() > 2, "another has been given KV in its place")
    until(lambda: answers.done >= requests, "all requests have ended")
    answers.wait(answers.done + clients.waiting)
    return answers.report(
        {
            "killed": int(first not in _replicas()),
            "asked_again": answers.asked_again,
            "scaled": before,
            "joined": len(loads) - before,
            "external_tokens": sum(loads.values()),
        },
        {"the decode replica that was killed had no request in hand: nothing was interrupted": not answers.asked_again},
    )


def _replicas() -> list[str]:
    """Return the decode replicas by Serve's names of them."""
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return [name.removeprefix(DECODE) for name in names if name.startswith(DECODE)]


def _kill_amid(replica: str) -> int:
    """End a decode replica at once while it answers requests, and without Serve knowing; return how many it had in hand."""
    import ray

    actor = ray.get_actor(DECODE + replica, "serve")
    until = time.monotonic() + AMID_S
    while not (ongoing := ray.get(actor.get_num_ongoing_requests.remote(), timeout=AMID_S)):
        if time.monotonic() > until:
            break
    ray.kill(actor)
    return int(ongoing)


def _loaded() -> dict[str, int]:
    """Return of how many prompt tokens each decode replica has been given KV, of those on Ray's page of metrics."""
    import ray

    port = ray.nodes()[0]["MetricsExportPort"]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    return {sample["replica"]: int(float(sample["tokens"])) for sample in LOADED.finditer(page)}
