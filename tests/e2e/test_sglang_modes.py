"""Real SGLang servers without a GPU in other set-ups: two ranks, KV received in host memory, roles that change at run time."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from kvxfer_bench.servers import Starter
from kvxfer_bench.sglang.compare import LENGTHS, measure_sglang
from kvxfer_bench.sglang.servers import SglangPair, ask_pair
from kvxfer_vllm.demo.servers import Server, ended_together, free_port
from tests.conftest import require
from tests.e2e.sglang_pair import CpuServer, Stage, complaints, expected, is_idle, prompt, ready, staged

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = 8
PROMPTS = [prompt(600 + n, n) for n in (1, 40, 600)]


@pytest.fixture(scope="module")
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    require("sglang")
    with staged(model, tmp_path_factory.mktemp("sglang-modes")) as stage:
        yield stage


@pytest.fixture(scope="module")
def wanted(stage: Stage) -> list[list[int]]:
    """A plain server's tokens."""
    plain = stage.plain()
    ready(plain)
    tokens = [expected(plain, ids, TOKENS) for ids in PROMPTS]
    plain.kill()
    return tokens


def answers(stage: Stage, pair: SglangPair, wanted: list[list[int]]) -> None:
    """Check that a pair answers as the plain server, one by one and at once."""
    for ids, tokens in zip(PROMPTS, wanted, strict=True):
        assert ask_pair(stage.threads, pair, ids, TOKENS).tokens() == tokens
    asked = [ask_pair(stage.threads, pair, ids, TOKENS) for ids in PROMPTS]
    assert [one.tokens() for one in asked] == wanted
    for server in (pair.prefill, pair.decode):
        is_idle(server)
        assert not complaints(server)


def test_two_ranks_prefill_and_one_decodes(stage: Stage, wanted: list[list[int]]) -> None:
    pair = stage.pair(prefill=("--tp-size", "2"))
    ready(pair.prefill, pair.decode)
    answers(stage, pair, wanted)
    retracted_requests_come_again(stage, pair)
    kill(pair)


def retracted_requests_come_again(stage: Stage, pair: SglangPair) -> None:
    """Decode gives up the KV of what it generates, and has prefill compute it again in the same room, twice."""
    undisturbed = [ask_pair(stage.threads, pair, ids, 200).tokens() for ids in PROMPTS]
    served = pair.prefill.log.read_text().count("POST /generate")
    asked = [ask_pair(stage.threads, pair, ids, 200) for ids in PROMPTS]
    for _ in range(2):
        time.sleep(0.2)
        for call in ("pause_generation", "continue_generation"):
            told = json.dumps({"mode": "retract"} if call == "pause_generation" else {}).encode()
            header = {"Content-Type": "application/json"}
            urllib.request.urlopen(
                urllib.request.Request(f"{pair.decode.url}/{call}", told, header), timeout=60
            ).close()
    assert [one.tokens() for one in asked] == undisturbed
    for server in (pair.prefill, pair.decode):
        is_idle(server)
        assert not complaints(server)
    assert pair.prefill.log.read_text().count("POST /generate") > served + len(PROMPTS), "nothing was retracted"


def test_kv_is_received_in_host_memory(stage: Stage, wanted: list[list[int]]) -> None:
    threshold = ("--disaggregation-decode-host-receive-threshold", "0")
    pair = stage.pair(decode=(*threshold, "--disaggregation-decode-retraction-backup", "host_pool"))
    ready(pair.prefill, pair.decode)
    answers(stage, pair, wanted)
    kill(pair)


def test_servers_switch_their_roles_and_back(stage: Stage, wanted: list[list[int]]) -> None:
    own = free_port()  # each server has a bootstrap server, for when it prefills
    flags = ("--enable-pd-role-switch", "--disable-radix-cache")
    pair = stage.pair(*flags, decode=("--disaggregation-bootstrap-port", str(own)))
    ports = [pair.bootstrap, own]
    ready(pair.prefill, pair.decode)
    answers(stage, pair, wanted)
    long = ask_pair(stage.threads, pair, PROMPTS[-1], 200)
    time.sleep(0.5)
    with pytest.raises(HTTPError):  # SGLang refuses it under load, and the request goes on
        switch(pair.decode, "prefill")
    assert long.tokens()[:TOKENS] == wanted[-1]
    is_idle(pair.decode)
    for _ in range(2):
        switch(pair.decode, "prefill")
        switch(pair.prefill, "decode")
        ports.reverse()
        pair = SglangPair(pair.decode, pair.prefill, ports[0])
        answers(stage, pair, wanted)
    kill(pair)


def switch(server: Server, role: str) -> None:
    body: dict[str, Any] = {"new_role": role, "decode_cuda_graph_memory_gb": 0}
    request = urllib.request.Request(
        f"{server.url}/pd_role_switch", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["success"]


def kill(pair: SglangPair) -> None:
    """Make room for the next servers."""
    for server in (pair.prefill, pair.decode):
        server.kill()


def test_back_ends_are_compared_in_turns(model: Path, tmp_path: Path) -> None:
    """The logic of `kvxfer bench sglang`, whose figures are for GPUs."""
    rows: list[dict[str, Any]] = []
    names = ["tcp", "zmq"]
    with ended_together() as begun:
        starter = Starter("tiny", model, tmp_path, (), (), begun, CpuServer)
        assert measure_sglang(starter, names, rows.append, (1, 2), prompt=64, tokens=4, rounds=1, tie=0.25)
    assert [row["backend"] for row in rows] == names * 4
    for row in rows[:2] + rows[-2:]:
        assert row["one_by_one"] == row["at_once"] == {"same": len(LENGTHS)}
    for row in rows[2:6]:
        assert 0 < row["first_ms"] <= row["first_ms_most"] and row["tokens_per_s"] > 0
