"""The table of requests, through vLLM's real front end and a router of each schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvxfer.testing.router import CASES, Deployment, HttpServer, Moves, RouterCase, Texts, check
from kvxfer_vllm.demo.servers import MODEL_NAME, Cluster, running
from tests.contract.router import SCHEMAS, Router
from tests.e2e.conftest import OF_ROUTERS, PATIENT, first_of
from tests.e2e.forked import Forked
from tests.e2e.models import EXACT_POSITIONS, LATENTS, write_mamba, write_mla, write_recurrent, write_window

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

WITHIN_S = 40.0
"""Until a busy machine has let go of what was offered, which is less than a lease."""
MODELS = {
    "llama": None,
    "window": (write_window, []),
    "latent": (write_mla, ["--block-size", "16", *LATENTS, *EXACT_POSITIONS]),
    "state": (write_recurrent, ["--no-enable-prefix-caching", *EXACT_POSITIONS]),
    "mamba": (write_mamba, ["--no-enable-prefix-caching"]),
}
"""The models of servers, and their flags; that of the session has servers."""
OFTEN = ("nixl", "named")
"""The schemas for which all cases run; the others shape the params alone, so some are enough."""
SOME = ("completion", "chat-streamed", "n-4", "list-one-token-0", "one-id", "rejected-by-decode", "hang-up-late")
OF_ONE_ANSWER = (
    *(
        "completion-ids",
        "completion-long",
        "completion-usage",
        "n-seeded",
        "best-of",
        "echo",
        "echo-logprobs",
        "logprobs",
    ),
    *(
        "prompt-logprobs",
        "stop",
        "stop-ids",
        "min-tokens",
        "penalties",
        "bias",
        "regex",
        "salt",
        "chat-n",
        "chat-logprobs",
    ),
    *("chat-schema", "chat-tools", "chat-tool-named", "chat-completion-tokens"),
)
"""What an answer is to be, which no schema has a part in: not how many requests there are, under which ids, nor when."""


def of(schema: str, case: RouterCase) -> Any:
    marks = [pytest.mark.slow] if schema != "nixl" and case.name in OF_ONE_ANSWER else []
    return pytest.param(schema, case, id=f"{schema}-{case.name}", marks=marks)


@pytest.fixture(scope="module", params=first_of(MODELS))
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[Cluster]:
    if (other := MODELS[request.param]) is None:
        yield request.getfixturevalue("cluster")
        return
    write, flags = other
    folder: Path = tmp_path_factory.mktemp("contract")
    write(folder / "model")
    with running(
        folder / "model", folder, {**PATIENT, "port": port}, PATIENT, flags=[*OF_ROUTERS, *flags], kind=Forked
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def deployments(servers: Cluster, port: int) -> Iterator[dict[str, Deployment]]:
    """The servers behind a router of each schema."""
    at = "127.0.0.1", port
    routers = {name: Router(servers.prefill.url, servers.decode.url, schema, at) for name, schema in SCHEMAS.items()}
    yield {name: deployed(servers, router, WITHIN_S) for name, router in routers.items()}
    for router in routers.values():
        router.stop()


def deployed(cluster: Cluster, router: Router, within: float) -> Deployment:
    plain, prefill, decode = (HttpServer(s.url) for s in (cluster.plain, cluster.prefill, cluster.decode))
    return Deployment(HttpServer(router.url), plain, [prefill], [decode], MODEL_NAME, within)


@pytest.mark.parametrize(
    ("schema", "case"),
    [of(schema, case) for schema in SCHEMAS for case in CASES if schema in OFTEN or case.name in SOME],
)
def test_contract(case: RouterCase, schema: str, deployments: dict[str, Deployment]) -> None:
    result = check(case, deployments[schema], Texts())
    assert result.outcome != "broken", result.said
    print(f"{result.outcome}: {result.said}")


def test_a_router_that_drops_the_params_is_found(cluster: Cluster) -> None:
    router = Router(cluster.prefill.url, cluster.decode.url, SCHEMAS["nixl"], drops=True)
    try:
        (case,) = [case for case in CASES if case.name == "completion"]
        assert case.moves is Moves.YES
        result = check(case, deployed(cluster, router, 8.0), Texts())
    finally:
        router.make_good()
        router.stop()
    assert result.outcome == "broken"
    assert "no request came with params" in result.said and "still hold 1 offers" in result.said
