"""Two KV-cache groups on real servers: beside full attention a sliding window, with null blocks where it has passed, and
a recurrent state."""

from collections.abc import Iterator

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, running
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.models import WINDOW, write_recurrent, write_window

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TEXT = ", ".join(f"{n} times {n + 3} is {n * (n + 3)}" for n in range(1, 60))
LENGTHS = {"within the window": WINDOW - 10, "one block past it": WINDOW + 40, "several chunks": 700, "the same again": 700}


# With prefix caching vLLM keeps states of several prefixes, which kvxfer does not move.
MODELS = [(write_window, []), (write_recurrent, ["--no-enable-prefix-caching"])]


@pytest.fixture(scope="module", params=MODELS, ids=["window", "recurrent"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Plain, prefill and decode."""
    require("vllm")
    folder = tmp_path_factory.mktemp("groups")
    write, flags = request.param
    write(folder / "model")
    with running(folder / "model", folder, PATIENT, flags=flags) as cluster:
        yield cluster


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
