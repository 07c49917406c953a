"""Other caches than Llama's on real servers. Two groups: beside full attention a sliding window, with null blocks where it has
passed, or recurrent states, one for a request or one for each prefix that vLLM caches. And MLA, one latent row a token."""

from collections.abc import Iterator

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.model import LAYERS
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import BLOCK, Cluster, running
from tests.conftest import require
from tests.e2e.conftest import PATIENT, first_of
from tests.e2e.forked import Forked
from tests.e2e.models import EXACT_POSITIONS, LATENTS, WINDOW, write_mla, write_recurrent, write_window

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TEXT = ", ".join(f"{n} times {n + 3} is {n * (n + 3)}" for n in range(1, 60))
LENGTHS = {
    "within the window": WINDOW - 10,
    "one block past it": WINDOW + 40,
    "several chunks": 700,
    "the same again": 700,
}


MODELS = {
    "window": (write_window, []),
    "state": (write_recurrent, ["--no-enable-prefix-caching"]),
    "states and a prefix cache": (write_recurrent, []),
    "latent": (write_mla, ["--block-size", "16", *LATENTS, *EXACT_POSITIONS]),
}
UNCACHED = {"state", "latent"}
"""Where vLLM caches no prefixes: with MLA it does not on CPUs."""
PREFIX = "".join(chr(97 + n * n % 26) for n in range(300))


@pytest.fixture(scope="module", params=first_of(MODELS))
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Plain, prefill and decode."""
    require("vllm")
    folder = tmp_path_factory.mktemp("groups")
    write, flags = MODELS[request.param]
    write(folder / "model")
    with running(folder / "model", folder, PATIENT, flags=flags, kind=Forked) as cluster:
        yield cluster


def test_every_layer_that_has_a_write_of_its_own_was_checked(servers: Cluster, request: pytest.FixtureRequest) -> None:
    (line,) = [
        line for line in servers.decode.log.read_text().splitlines() if "write their KV cache as described" in line
    ]
    if "state" in request.node.callspec.id:
        assert f" {LAYERS // 2} of {LAYERS} layers write" in line and f"not checked: {LAYERS // 2} x ShortConv" in line
    else:
        assert f" {LAYERS} of {LAYERS} layers write" in line and "not checked" not in line


@pytest.mark.parametrize("name", LENGTHS)
def test_tokens_are_those_of_a_plain_server(servers: Cluster, name: str) -> None:
    prompt = TEXT[: LENGTHS[name]]
    expected = complete(servers.plain, prompt, 32)
    assert len(set(expected.tokens)) > 3, "output this dull would not show a spoilt cache"
    before = received(servers.decode)
    assert prefill_then_decode(servers.prefill, servers.decode, prompt, 32).tokens == expected.tokens
    got = received(servers.decode) - before
    assert not got.failed
    assert got.tokens > 0 if name != "the same again" else got.tokens < 700


@pytest.mark.parametrize("where", ["prefill", "decode", "both", "neither"])
def test_a_prefix_that_is_cached(servers: Cluster, request: pytest.FixtureRequest, where: str) -> None:
    """Where decode has it, only the rest comes; where prefill has it, all of it comes as if it had just been computed."""
    caches = request.node.callspec.params["servers"] not in UNCACHED
    prefix, rest = f"{where} {PREFIX}", "and then " + ", ".join(f"{n}" for n in range(40))
    for server in {"prefill": [servers.prefill], "decode": [servers.decode], "neither": []}.get(
        where, [servers.prefill, servers.decode]
    ):
        complete(server, prefix, 1)
    expected = complete(servers.plain, prefix + rest, 32)
    before = received(servers.decode)
    assert prefill_then_decode(servers.prefill, servers.decode, prefix + rest, 32).tokens == expected.tokens
    got = received(servers.decode) - before
    assert not got.failed
    missing = expected.prompt_tokens - 1
    if caches and where in ("decode", "both"):
        missing -= len(prefix) // BLOCK * BLOCK
    assert got.tokens == missing
