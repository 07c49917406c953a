"""The table of requests, through vLLM's real front end and a router of each schema."""

from __future__ import annotations

import pytest

from kvxfer.testing.router import CASES, Deployment, Moves, RouterCase, Texts, check
from kvxfer_vllm.demo.servers import Cluster
from tests.contract.conftest import deployed
from tests.contract.router import SCHEMAS, Router

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

OFTEN = ("nixl", "named")
"""The schemas for which all cases run; the others shape the params alone, so some are enough."""
SOME = ("completion", "chat-streamed", "n-4", "list-one-token-0", "one-id", "rejected-by-decode", "hang-up-late")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_contract(case: RouterCase, deployment: Deployment, request: pytest.FixtureRequest) -> None:
    schema = request.node.callspec.params["deployment"]
    if schema not in OFTEN and case.name not in SOME:
        pytest.skip("this schema shapes the params alone")
    result = check(case, deployment, Texts())
    assert result.outcome != "broken", f"{schema}, {case.name}: {result.said}"
    print(f"{result.outcome}: {result.said}")


def test_a_router_that_drops_the_params_is_found(cluster: Cluster) -> None:
    router = Router(cluster.prefill.url, cluster.decode.url, SCHEMAS["nixl"], drops=True)
    try:
        (case,) = [case for case in CASES if case.name == "completion"]
        assert case.moves is Moves.YES
        result = check(case, deployed(cluster, router), Texts())
    finally:
        router.make_good()
        router.stop()
    assert result.outcome == "broken"
    assert "no request came with params" in result.said and "still hold 1 offers" in result.said
