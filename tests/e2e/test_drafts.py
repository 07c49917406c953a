"""A draft model beside the model that is served: on both servers, or on one of them only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, Server, await_ready, connector, ended_together
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

TOKENS, GUESSES = 24, 3
TEXT = ", ".join(f"{n} plus {n + 5} is {2 * n + 5}" for n in range(1, 40))


@pytest.fixture(scope="module")
def servers(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The draft model is the model itself, so that each guess is right if the draft model's cache is."""
    logs = tmp_path_factory.mktemp("drafts")
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": GUESSES}
    with ended_together() as begun:
        started = {}
        for side, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            server = Forked(
                f"{side}-drafting",
                model,
                logs,
                connector(role, PATIENT),
                ["--speculative-config", json.dumps(speculative)],
            )
            begun.append(server)
            started[f"drafting {side}"] = server
        await_ready(started.values(), 300.0)
        yield started | {"prefill": cluster.prefill, "decode": cluster.decode}


@pytest.mark.parametrize("of", ["prefill", "drafting prefill"])
@pytest.mark.parametrize("to", ["decode", "drafting decode"])
def test_tokens_are_those_of_a_plain_server(cluster: Cluster, servers: dict[str, Server], of: str, to: str) -> None:
    drafts = to.startswith("drafting")
    prompt = f"{of} {to} {TEXT}"
    before, guesses = received(servers[to]), _guesses(servers[to]) if drafts else (0, 0)
    tokens = prefill_then_decode(servers[of], servers[to], prompt, TOKENS).tokens
    expected = complete(cluster.plain, prompt, TOKENS)
    assert tokens == expected.tokens
    got = received(servers[to]) - before
    assert (got.tokens, got.failed) == (expected.prompt_tokens - 1, 0)
    if not drafts:
        return
    made, right = (now - then for now, then in zip(_guesses(servers[to]), guesses, strict=True))
    if of.startswith("drafting"):  # in its first step vLLM fills the place of guesses with what is none
        assert right >= made - GUESSES > 0, "the draft model's cache did not come"
    else:
        assert made - right > GUESSES, "the draft model knows a prompt of which its cache has nothing"


def _guesses(server: Server) -> tuple[float, float]:
    """Draft tokens so far, and how many of them were right."""
    return total(server, "vllm:spec_decode_num_draft_tokens_total"), total(
        server, "vllm:spec_decode_num_accepted_tokens_total"
    )
