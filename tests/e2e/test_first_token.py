"""The benchmarks of the first token measure what they say: KV that came from the prefill server."""

from typing import Any

import pytest

from kvxfer.errors import ConfigError
from kvxfer_bench.vllm.beside import LOADS
from kvxfer_bench.vllm.engines import Rounds
from kvxfer_bench.vllm.kinds import PromptCase, Prompts
from kvxfer_bench.vllm.pairs import ServerPair
from kvxfer_vllm.demo.metrics import loaded_tokens
from kvxfer_vllm.demo.servers import Cluster, Server

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def turns(cluster: Cluster, rows: list[dict[str, Any]]) -> Rounds:
    """The servers under two names, as if they were two pairs."""
    pair = ServerPair(cluster.prefill, cluster.decode, cluster.plain, None)
    return Rounds({"one": pair, "other": pair}, Prompts(500), 1, lambda row: rows.append(dict(row)))


def test_first_tokens_of_several_requests_by_kind(turns: Rounds, rows: list[dict[str, Any]]) -> None:
    turns.first_tokens(PromptCase(256, 2), others=0)
    assert [row["backend"] for row in rows] == ["one", "other"] and not turns.failed
    found = rows[0]
    assert found["tokens_loaded"] == pytest.approx(2, abs=0.02), "what is called loaded came from the prefill server"
    kinds = ("least", "computed", "cached", "loaded", "prefilled", "plain_computed", "prefill_computed")
    assert all(0 < found[f"{kind}_ms"] < 5000 for kind in kinds) and "together_ms" not in found
    assert "step_ms" not in found, "nobody decodes meanwhile"
    assert found["loaded_over_least_ms"] == pytest.approx(found["loaded_ms"] - found["least_ms"], abs=0.02)


def test_the_first_token_is_told_in_steps_of_the_others(turns: Rounds, rows: list[dict[str, Any]]) -> None:
    turns.first_tokens(PromptCase(512, 1), others=3)
    found = rows[0]
    least, loaded, step = found["least_ms"], found["loaded_ms"], found["step_ms"]
    assert 0 < step < least < 5000 and 0 < found["transfer_ms"] < loaded < 5000
    assert found["loaded_over_least_steps"] == pytest.approx((loaded - least) / step, abs=0.05)
    assert found["loaded_to_step_and_transfer"] == pytest.approx(loaded / (step + found["transfer_ms"]), abs=0.05)
    assert step / 5 < found["step_while_loading_ms"] <= found["longest_step_while_loading_ms"]


def test_what_loads_cost_beside_them(turns: Rounds, rows: list[dict[str, Any]], cluster: Cluster) -> None:
    before = loaded_tokens(cluster.decode)
    turns.beside(PromptCase(128, 1), others=3)
    assert loaded_tokens(cluster.decode) - before == pytest.approx(2 * 2 * 2 * LOADS * 128, rel=0.02)
    found = rows[0]
    assert 0 < found["prefill_ms"] < 5000 and 0 < found["prefill_beside_ms"] < 5000 and found["decoded_tokens_s"] > 0
    lost = (found["decoded_tokens_s"] - found["decoded_beside_tokens_s"]) * found["loads_ms"] / 1e3 / LOADS
    assert found["decoded_tokens_lost_a_load"] == pytest.approx(lost, abs=0.1)


def test_a_pair_that_fails_is_left_out_and_the_others_are_measured(
    cluster: Cluster, rows: list[dict[str, Any]]
) -> None:
    class Gone(Server):
        def __init__(self) -> None:
            self.name, self.log, self.url = "gone", cluster.prefill.log, "http://127.0.0.1:9"

    pairs = {
        "gone": ServerPair(Gone(), cluster.decode, None, None),
        "there": ServerPair(cluster.prefill, cluster.decode, None, None),
    }
    said: list[str] = []
    turns = Rounds(pairs, Prompts(500), 1, lambda row: rows.append(dict(row)), said.append)
    turns.first_tokens(PromptCase(64, 1), others=0)
    assert turns.failed
    assert said == ["time to first token, 64 tokens, warm-up", "time to first token, 64 tokens, round 1 of 1"]
    assert [(row["backend"], "error" in row) for row in rows] == [("gone", True), ("there", False)]
    assert "the gone server did not answer /v1/completions" in rows[0]["error"]


@pytest.mark.parametrize("case", ["", "x", "many", "15", "1024x0", "1024x", "x16", "1024x2x2", "-5"])
def test_a_case_that_is_none_is_refused(case: str) -> None:
    with pytest.raises(ConfigError, match="--case"):
        PromptCase.parse(case)


def test_a_case_is_a_length_and_how_many_at_once() -> None:
    assert (PromptCase.parse("1024"), PromptCase.parse("512x16")) == (PromptCase(1024, 1), PromptCase(512, 16))
