"""A rolling upgrade: prefill and decode servers of two releases of vLLM, each way round, give a plain server's tokens, and KV moves.

`KVXFER_OTHER_VLLM` names the interpreter of an environment with another release than this one's; `make test-upgrade` makes one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvxfer_vllm.demo.metrics import received, total
from kvxfer_vllm.demo.routing import complete, prefill_then_decode
from kvxfer_vllm.demo.servers import BLOCK, CHUNK, Server, await_ready, connector, ended_together
from tests.e2e.conftest import PATIENT

OTHER = os.environ.get("KVXFER_OTHER_VLLM")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(540),
    pytest.mark.skipif(not OTHER, reason="KVXFER_OTHER_VLLM names no interpreter with another release of vLLM"),
]


class Other(Server):
    """A server of the other release."""

    def _begin(self, before: Sequence[str], arguments: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        assert OTHER is not None
        return super()._begin([OTHER, "-c", _INSTEAD, *before], arguments, env)


_INSTEAD = "import os, sys; i = sys.argv.index('-m'); os.execv(sys.executable, [sys.executable, *sys.argv[i:]])"
"""Runs what follows the interpreter that ``Server`` would take."""


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Each may prefill and decode."""
    logs = tmp_path_factory.mktemp("logs")
    with ended_together() as begun:
        begun.append(Server("plain", model, logs))
        begun.append(Server("this", model, logs, connector("kv_both", PATIENT)))
        begun.append(Other("other", model, logs, connector("kv_both", PATIENT)))
        await_ready(begun, 300.0)
        yield {server.name: server for server in begun}


def test_they_are_of_different_releases(servers: dict[str, Server]) -> None:
    said = {
        line.partition("version ")[2].split()[0]
        for server in servers.values()
        for line in server.log.read_text().splitlines()
        if "version " in line and "API server" in line
    }
    assert len(said) != 1, said


@pytest.mark.parametrize(("prefill", "decode"), [("other", "this"), ("this", "other")])
def test_kv_moves_between_releases(servers: dict[str, Server], prefill: str, decode: str) -> None:
    p, d = servers[prefill], servers[decode]
    for n, length in enumerate((BLOCK + 5, CHUNK + 70, 3 * BLOCK)):
        prompt = f"{prefill} {n} " + "".join(chr(97 + (n + i * i) % 26) for i in range(length))
        before = received(d)
        assert prefill_then_decode(p, d, prompt, 16).tokens == complete(servers["plain"], prompt, 16).tokens
        moved = received(d) - before
        assert moved.failed == 0 and moved.tokens >= len(prompt) - 1
    complete(p, "a step", 1)
    assert total(p, "kvxfer_offers_in_hand") == 0
