"""Two KV-cache groups on real servers: a sliding window, with null blocks where it has passed, beside full attention."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, Server, await_ready, connector
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.two_groups import WINDOW, write_two_groups

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TEXT = ", ".join(f"{n} times {n + 3} is {n * (n + 3)}" for n in range(1, 60))
LENGTHS = {"within the window": WINDOW - 10, "one block past it": WINDOW + 40, "several chunks": 700, "the same again": 700}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Plain, prefill and decode."""
    require("vllm")
    folder = tmp_path_factory.mktemp("two-groups")
    write_two_groups(folder / "model")
    with ExitStack() as stack:

        def start(name: str, role: str | None = None) -> Server:
            server = Server(name, folder / "model", folder, connector(role, PATIENT) if role else None)
            stack.callback(server.stop)
            return server

        cluster = Cluster(start("plain"), start("prefill", "kv_producer"), start("decode", "kv_consumer"))
        await_ready([cluster.plain, cluster.prefill, cluster.decode], 300)
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
