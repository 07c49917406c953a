"""Real servers, started once for all cases that leave them intact."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.servers import Cluster, free_port, running
from tests.conftest import require
from tests.e2e.forked import Forked

PATIENT = {
    "backend": "tcp",
    "backend_options": {"connect_timeout_s": 60.0, "heartbeat_s": 30.0},
    "transfer_timeout": 60.0,
    "peer_timeout": 60.0,
    "lease": 60.0,
}
"""For tests of what arrives, not of when: with a dozen processes on two cores, a healthy one can be silent for long."""


OF_ROUTERS = [
    "--chat-template",
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
]
"""Flags of servers that answer all requests of the table of routers."""


def first_of(values: Iterable[Any]) -> list[Any]:
    """Parameters of a fixture that starts servers: all but the first are for `make test-all`."""
    first, *others = values
    return [first, *(pytest.param(other, marks=pytest.mark.slow) for other in others)]


@pytest.fixture(scope="session", autouse=True)
def imported(request: pytest.FixtureRequest) -> None:
    """SGLang is imported, which takes a core for long, while vLLM takes the other for the same."""
    if any(item.path.name.startswith("test_sglang") for item in request.session.items):
        from tests.e2e.sglang_pair import CpuServer

        CpuServer.forker()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def port() -> int:
    """Where the directory of the cluster's prefill server is, for routers that name it."""
    return free_port()


@pytest.fixture(scope="session")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Cluster]:
    """Prefill and decode with kvxfer over tcp between them, and a plain server."""
    require("vllm")
    logs = tmp_path_factory.mktemp("logs")
    with running(model, logs, {**PATIENT, "port": port}, PATIENT, flags=OF_ROUTERS, kind=Forked) as servers:
        yield servers
