"""One prefill, one decode and one plain server for all cases of the folder, and a router for each schema."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvxfer.testing.router import Deployment, HttpServer
from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.servers import MODEL_NAME, Cluster, free_port, running
from tests.conftest import require
from tests.contract.router import SCHEMAS, Router
from tests.e2e.forked import Forked
from tests.e2e.models import EXACT_POSITIONS, LATENTS, write_mamba, write_mla, write_recurrent, write_window

LEASE_S = 60.0
WITHIN_S = 8.0
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "llama": (write_model, []),
    "window": (write_window, []),
    "latent": (write_mla, ["--block-size", "16", *LATENTS, *EXACT_POSITIONS]),
    "state": (write_recurrent, ["--no-enable-prefix-caching", *EXACT_POSITIONS]),
    "mamba": (write_mamba, ["--no-enable-prefix-caching"]),
}
"""The models that the folder's tests can run with, by ``KVXFER_CONTRACT_MODEL``, and flags of their servers."""


@pytest.fixture(scope="session")
def port() -> int:
    """Where P's directory is, for routers that name it."""
    return free_port()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Cluster]:
    require("vllm")
    write, more = MODELS[os.environ.get("KVXFER_CONTRACT_MODEL", "llama")]
    model = tmp_path_factory.mktemp("model")
    write(model)
    settings = {"backend": "tcp", "lease": LEASE_S, "transfer_timeout": 60.0, "peer_timeout": 60.0}
    logs = tmp_path_factory.mktemp("logs")
    flags = ["--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", *more]
    with running(model, logs, {**settings, "port": port}, settings, flags=flags, kind=Forked) as servers:
        yield servers


@pytest.fixture(scope="session", params=SCHEMAS)
def deployment(request: pytest.FixtureRequest, cluster: Cluster, port: int) -> Iterator[Deployment]:
    router = Router(cluster.prefill.url, cluster.decode.url, SCHEMAS[request.param], ("127.0.0.1", port))
    yield deployed(cluster, router)
    router.stop()


def deployed(cluster: Cluster, router: Router) -> Deployment:
    plain, prefill, decode = (HttpServer(s.url) for s in (cluster.plain, cluster.prefill, cluster.decode))
    return Deployment(HttpServer(router.url), plain, [prefill], [decode], MODEL_NAME, WITHIN_S)
