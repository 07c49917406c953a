"""Recurrent states between engines of different tensor parallel sizes are refused, on real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import Server, await_ready, connector
from tests.conftest import require
from tests.e2e.conftest import PATIENT
from tests.e2e.models import write_recurrent

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

TEXT = "a few blocks: " + "ab" * 117


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One of each size, which gives and takes, and a plain one."""
    require("vllm")
    folder = tmp_path_factory.mktemp("states")
    write_recurrent(folder / "model")
    with ExitStack() as stack:

        def start(name: str, kv_transfer: dict[str, object] | None, flags: list[str]) -> Server:
            server = Server(name, folder / "model", folder, kv_transfer, flags)
            stack.callback(server.stop)
            return server

        both = {**connector("kv_both", PATIENT), "kv_load_failure_policy": "recompute"}
        started = {
            "plain": start("plain", None, []),
            "TP 1": start("tp-1", both, []),
            "TP 2": start("tp-2", both, ["--tensor-parallel-size", "2"]),
        }
        await_ready(started.values(), 300.0)
        yield started


@pytest.mark.parametrize(("of", "to"), [("TP 2", "TP 1"), ("TP 1", "TP 2")], ids=lambda size: size.replace(" ", ""))
def test_states_of_other_numbers_of_ranks_are_refused_by_name(servers: dict[str, Server], of: str, to: str) -> None:
    """And the request is answered, from its prompt."""
    prompt = f"{of} {to} {TEXT}"
    before = received(servers[to])
    answer = prefill_then_decode(servers[of], servers[to], prompt, 24)
    got = received(servers[to]) - before
    assert (got.tokens, got.failed) == (0, int(to[-1]))  # each rank says so
    assert answer.tokens == complete(servers[to], prompt, 24).tokens
    if to == "TP 1":
        assert answer.tokens == complete(servers["plain"], prompt, 24).tokens
    assert "of 1 ranks" in servers[to].log.read_text() and "of 2 ranks" in servers[to].log.read_text()
