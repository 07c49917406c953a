"""What `kvxfer bench sglang` makes of answers, and what it refuses before it starts a server."""

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import app
from kvxfer_bench.sglang.servers import started_pair
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
