"""Every back end that moves CPU memory here, between real servers; tcp is the shared pair's (test_pair.py), nixl the
demo's (test_demo.py)."""

import os
from pathlib import Path

import pytest

from kvxfer.transport import registry
from kvxfer_vllm.demo.prompts import PROMPTS, compare, objections
from kvxfer_vllm.demo.servers import Cluster, running
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked, Fresh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

ROOT = Path(__file__).parents[2]
EXAMPLE = "kvxfer_shm:ShmTransport"
"""Only the servers can load it, because it is not installed."""


@pytest.mark.slow  # test_faults.py has zmq between servers
@pytest.mark.parametrize("backend", sorted({*registry.available(), "cma", EXAMPLE} - {"tcp", "nixl"}))
def test_tokens_are_those_of_a_plain_server(
    cluster: Cluster, model: Path, tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Fresh if backend == EXAMPLE else Forked
    if backend == EXAMPLE:
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples" / "kvxfer-shm"), prepend=os.pathsep)
    else:
        require(backend)
        if "cpu" not in registry.load(backend).probe().memory:
            pytest.skip(f"{backend} does not move CPU memory here")
    config = {**PATIENT, "backend": backend, "backend_options": {}}
    with running(model, tmp_path, config, plain=cluster.plain, kind=kind) as servers:
        outcomes = [compare(servers, name, prompt) for name, prompt in PROMPTS.items()]
    assert objections(outcomes) == []
    assert sum(outcome.received.kv_bytes for outcome in outcomes) > 0
