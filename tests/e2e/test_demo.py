"""`kvxfer demo` as a user runs it: as it should be, and when something is wrong."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import build
from kvxfer_vllm.demo import servers
from kvxfer_vllm.demo.servers import Server, ServerError, await_ready
from tests.conftest import require
from tests.e2e.forked import Forked, Fresh

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]


AFRESH = dict.fromkeys(("plain", "prefill", "decode"), Server)


@pytest.mark.parametrize(
    "kinds",
    [{"decode": Fresh}, pytest.param(AFRESH, marks=pytest.mark.slow)],
    ids=["an interpreter of its own for decode", "as users start it"],
)
def test_one_command_moves_kv_and_compares_tokens(
    kinds: dict[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a back end that is not the default; what `make demo` does besides is to take the default, and to start all servers afresh."""
    require("vllm")
    require("nixl")

    def start(name: str, *more: Any) -> Server:
        return kinds.get(name, Forked)(name, *more)

    monkeypatch.setattr(servers, "running", partial(servers.running, kind=start))
    result = CliRunner().invoke(build(), ["demo", "--json", "--backend", "nixl"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["backend"] == "nixl"
    assert report["tokens_identical"] and all(request["tokens_identical"] for request in report["requests"])
    assert report["kv_bytes"] > 0 and report["external_kv_tokens"] > 0
    assert all(request["transfer_seconds"] > 0 for request in report["requests"])


def test_a_server_that_cannot_start_fails_at_once_in_its_own_words(tmp_path: Path) -> None:
    require("vllm")
    server = Forked("broken", tmp_path / "no-model", tmp_path)
    try:
        with pytest.raises(ServerError, match=r"first error in its log, broken\.log: .*Error") as caught:
            await_ready([server], 120)
    finally:
        server.stop()
    assert "no-model" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--config", "{", "--config"),
        ("--config", "[1]", "--config"),
        ("--config", '{"transfer_timeouts": 3}', "did you mean 'transfer_timeout'"),
        ("--config", '{"backend": "zmqq"}', "zmqq"),
        ("--keep-logs", f"{__file__}/logs", "Not a directory; name a folder"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(option: str, value: str, word: str) -> None:
    require("vllm")
    result = CliRunner().invoke(build(), ["demo", "--json", option, value])
    assert (result.exit_code, result.stdout) == (1, "") and isinstance(result.exception, SystemExit)
    assert word in result.stderr and "Starting" not in result.stderr and "Traceback" not in result.stderr
