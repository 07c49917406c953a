"""A model whose layers have different numbers of KV heads, between engines of different tensor parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Cluster, Server, await_ready, connector, ended_together, running
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked
from tests.e2e.models import write_unlike_heads

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

TWO = ["--tensor-parallel-size", "2"]
TEXT = ", ".join(f"{n} times {n + 3} is {n * (n + 3)}" for n in range(1, 60))


@dataclass
class Servers:
    one: Cluster
    prefill_two: Server
    decode_two: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    require("vllm")
    folder = tmp_path_factory.mktemp("heads")
    write_unlike_heads(folder / "model")
    with running(folder / "model", folder, PATIENT, kind=Forked) as one, ended_together() as two:
        for name, role in (("prefill-tp-2", "kv_producer"), ("decode-tp-2", "kv_consumer")):
            two.append(Forked(name, folder / "model", folder, connector(role, PATIENT), TWO))
        await_ready(two, 300.0)
        yield Servers(one, *two)


@pytest.mark.parametrize("length", [40, 700])
@pytest.mark.parametrize(("prefill", "decode"), [(2, 1), (1, 2), (2, 2)])
def test_tokens_are_those_of_one_plain_server(servers: Servers, prefill: int, decode: int, length: int) -> None:
    producer = servers.prefill_two if prefill == 2 else servers.one.prefill
    consumer = servers.decode_two if decode == 2 else servers.one.decode
    prompt = f"{prefill} to {decode}: {TEXT}"[:length]
    expected = complete(servers.one.plain, prompt, 24).tokens
    assert len(set(expected)) > 3, "output this dull would not show a spoilt cache"
    before = received(consumer)
    assert prefill_then_decode(producer, consumer, prompt, 24).tokens == expected
    moved = received(consumer) - before
    assert moved.failed == 0
    assert moved.tokens > 0, "nothing came from prefill: this would test recomputation"
