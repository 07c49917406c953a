"""Real servers, started once for all cases that leave them intact."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer_vllm.demo.model import write_model
from kvxfer_vllm.demo.servers import Cluster, running
from tests.conftest import require
from tests.e2e.forked import Forked

PATIENT = {
    "backend": "tcp",
    "backend_options": {"connect_timeout_s": 60.0, "heartbeat_s": 30.0},
    "transfer_timeout": 60.0,
    "peer_timeout": 60.0,
}
"""For tests of what arrives, not of when: with a dozen processes on two cores, a healthy one can be silent for long."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Prefill and decode with kvxfer over tcp between them, and a plain server."""
    require("vllm")
    with running(model, tmp_path_factory.mktemp("logs"), PATIENT, kind=Forked) as servers:
        yield servers
