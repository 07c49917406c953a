"""What `kvxfer bench sglang` makes of answers, and what it refuses before it starts a server."""

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer_bench.sglang import turns
from kvxfer_bench.sglang.asking import Asked
from kvxfer_bench.sglang.servers import SglangPair, started_pair
from kvxfer_bench.sglang.turns import Expectation, made_up
from kvxfer_vllm.demo.servers import Server


@pytest.mark.parametrize(
    ("tokens", "verdict"),
    [
        ([1, 2, 3], "same"),
        ([1, 2, 9], "tied"),
        ([1, 9, 3], "different"),
        ([1, 9, 9], "different"),
        ([1, 2], "different"),
        ([1, 2, 3, 4], "different"),
    ],
)
def test_a_tie_is_where_the_first_other_token_was_nearly_as_good(tokens: list[int], verdict: str) -> None:
    expectation = Expectation([7], [1, 2, 3], [0.0, 4.0, 0.1])
    assert expectation.verdict(tokens, 0.25) == verdict


def test_prompts_depend_on_their_seed() -> None:
    assert made_up("a", 9) == made_up("a", 9) != made_up("b", 9)


@pytest.mark.parametrize("listens", [True, False])
def test_an_abort_comes_while_prefill_is_at_it_or_is_not_told(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """If nothing was left to abort, what passed would be the time of the whole answer."""
    prefill_s, asked = 0.4, list[Asked]()

    def ask(threads: ThreadPoolExecutor, pair: SglangPair, ids: list[int], tokens: int, timeout: float) -> Asked:
        assert len(ids) == 700
        asked.append(Asked(str(len(asked)), Future(), Future()))
        for answer in (asked[-1].prefill, asked[-1].decode):
            threading.Timer(prefill_s, end, (answer, {"meta_info": {}, "output_ids": [1]})).start()
        return asked[-1]

    def end(answer: Future[Any], value: dict[str, Any]) -> None:
        if not answer.done():
            answer.set_result(value)

    def abort(server: Server, rid: str) -> None:
        assert rid == f"{len(asked) - 1}-{server}"
        if listens:
            for answer in (asked[-1].prefill, asked[-1].decode):
                end(answer, {"meta_info": {"finish_reason": {"type": "abort"}}})

    monkeypatch.setattr(turns, "ask_pair", ask)
    monkeypatch.setattr(turns, "abort", abort)
    rows: list[Mapping[str, Any]] = []
    pair = SglangPair("p", "d", 1)  # type: ignore[arg-type]
    measured = turns.SglangTurns({"tcp": pair}, rows.append)
    measured.aborts(700)
    assert not measured.failed and [(row["backend"], row["prompt"]) for row in rows] == [("tcp", 700)]
    assert prefill_s / 2 <= rows[0]["after_s"] < prefill_s
    told = {name: took for name, took in rows[0].items() if name.startswith("aborted")}
    assert set(told) == ({"aborted_by_prefill_s", "aborted_by_decode_s"} if listens else set())
    assert all(took < prefill_s / 2 for took in told.values())


@pytest.mark.parametrize(("name", "stock"), [("nixl", False), ("sglang:nixl", True)])
def test_a_back_end_is_kvxfers_or_sglangs_own(name: str, stock: bool) -> None:
    told: list[tuple[str, str, list[str], dict[str, str]]] = []

    def start(*what: object) -> Server:
        told.append(what)  # type: ignore[arg-type]
        return Server.__new__(Server)

    pair = started_pair(name, start)
    assert [(label, role) for label, role, *_ in told] == [
        (f"{name.replace(':', '-')}-{role}", role) for role in ("prefill", "decode")
    ]
    for _, role, flags, env in told:
        assert flags[:4] == [
            "--disaggregation-mode",
            role,
            "--disaggregation-transfer-backend",
            "nixl" if stock else "kvxfer",
        ]
        assert flags[4:] == ["--disaggregation-bootstrap-port", str(pair.bootstrap)]
        assert env == ({} if stock else {"KVXFER_SGLANG": '{"backend": "nixl"}'})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "huge"], "unknown --model"),
        (["--dtype", "int4"], "unknown --dtype"),
        (["--prompt", "2000", "--tokens", "400"], "do not fit"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "sglang", "tcp", *arguments])
    assert result.exit_code != 0 and words in result.output + str(result.exception)
