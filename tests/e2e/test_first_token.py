"""The benchmarks of the first token measure what they say: KV that came from the prefill server."""

import pytest

from kvxfer.errors import ConfigError
from kvxfer_vllm.demo.engines import PromptCase, Prompts, ServerPair, first_tokens
from kvxfer_vllm.demo.first_token import measure
from kvxfer_vllm.demo.servers import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_the_first_token_is_timed_beside_others(cluster: Cluster) -> None:
    found = measure(cluster.prefill, cluster.decode, tokens=512, rounds=2, others=3)
    assert found["failed"] == 0 and found["tokens_loaded"] >= 3 * 480  # a warm-up and two rounds
    least, loaded = found["first_token_least_ms"], found["first_token_loaded_ms"]
    assert 0 < found["step_ms"] < least < 5000 and 0 < loaded < 5000
    assert found["load_in_steps"] == pytest.approx((loaded - least) / found["step_ms"], abs=0.05)
    assert 0 < found["transfer_ms"] < loaded
    assert found["first_token_ratio"] == pytest.approx(loaded / (found["step_ms"] + found["transfer_ms"]), abs=0.05)


def test_first_tokens_of_several_requests_by_kind(cluster: Cluster) -> None:
    pair = ServerPair(cluster.prefill, cluster.decode, cluster.plain, None)
    found = first_tokens(pair, Prompts(500), PromptCase(256, 2), rounds=1)
    assert found["tokens_loaded"] == pytest.approx(1, abs=0.01), "what is called loaded came from the prefill server"
    kinds = ("least", "computed", "cached", "loaded", "prefilled", "plain_computed", "prefill_computed")
    assert all(0 < found[f"{kind}_ms"] < 5000 for kind in kinds) and "together_ms" not in found
    assert found["loaded_over_least_ms"] == pytest.approx(found["loaded_ms"] - found["least_ms"], abs=0.02)


@pytest.mark.parametrize("case", ["", "x", "many", "15", "1024x0", "1024x", "x16", "1024x2x2", "-5"])
def test_a_case_that_is_none_is_refused(case: str) -> None:
    with pytest.raises(ConfigError, match="--case"):
        PromptCase.parse(case)


def test_a_case_is_a_length_and_how_many_at_once() -> None:
    assert (PromptCase.parse("1024"), PromptCase.parse("512x16")) == (PromptCase(1024, 1), PromptCase(512, 16))
