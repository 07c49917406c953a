"""Servers with two API servers each: what all of them export together is what happened."""

from pathlib import Path

import pytest

from kvxfer.testing.engine import until
from kvxfer_vllm.demo.metrics import total
from kvxfer_vllm.demo.routing import prefill_then_decode
from kvxfer_vllm.demo.servers import running
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Fresh

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

LOADS = 10


def test_each_load_is_counted_once_and_none_stays_in_hand(model: Path, tmp_path: Path) -> None:
    require("vllm")
    with running(model, tmp_path, PATIENT, flags=["--api-server-count", "2"], kind=Fresh) as servers:
        for number in range(LOADS):
            prefill_then_decode(servers.prefill, servers.decode, f"{number}: " + "word " * 30, 4)
        until(lambda: total(servers.decode, "kvxfer_loads_in_hand") == 0, 30.0)
        assert total(servers.decode, "kvxfer_transfers_total") == LOADS
