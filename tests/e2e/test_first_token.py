"""The benchmark of the first token measures what it says: KV that came from the prefill server, on a busy decode server."""

import pytest

from kvxfer_vllm.demo.first_token import measure
from kvxfer_vllm.demo.servers import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_the_first_token_is_timed_beside_others(cluster: Cluster) -> None:
    found = measure(cluster.prefill, cluster.decode, tokens=512, rounds=2, others=3)
    assert found["failed"] == 0 and found["tokens_loaded"] >= 3 * 480  # a warm-up and two rounds
    least, loaded = found["first_token_least_ms"], found["first_token_loaded_ms"]
    assert 0 < found["step_ms"] < least < 5000 and 0 < loaded < 5000
    assert found["load_in_steps"] == pytest.approx((loaded - least) / found["step_ms"], abs=0.05)
