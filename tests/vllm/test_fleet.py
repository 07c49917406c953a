"""What `kvxfer bench fleet` sends, and how it judges what comes back, against a server that is none; the run itself is `make fleet`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.main import build
from kvxfer_bench.vllm.clients import Answers, Wish, ask, wishes
from kvxfer_bench.vllm.fleet import _objections


def test_requests_are_mixed_and_the_same_for_a_seed() -> None:
    wanted = wishes(200, 3)
    assert wanted == wishes(200, 3) != wishes(200, 4)
    assert len(wanted) == 200 and 60 < sum(wish.streams for wish in wanted) < 140
    assert min(len(wish.prompt) for wish in wanted) < 32 and max(len(wish.prompt) for wish in wanted) > 256
    assert max(len(wish.prompt) + wish.tokens for wish in wanted) < 2048
    lengths = {wish.prompt: wish.tokens for wish in wanted}
    assert len(lengths) < 200 and all(lengths[wish.prompt] == wish.tokens for wish in wanted)


@pytest.fixture
def url() -> Iterator[str]:
    """A server that answers every prompt with tokens 1, 2, 3, `fails` with 400, and `fails once` with that and then like any other."""
    failed: list[str] = []

    class Api(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert asked["return_token_ids"] and asked["temperature"] == 0
            if asked["prompt"] == "fails" or (asked["prompt"] == "fails once" and not failed):
                failed.append(asked["prompt"])
                self.send_error(400)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream" if asked["stream"] else "application/json")
            self.end_headers()
            parts = [[1], [2, 3]] if asked["stream"] else [[1, 2, 3]]
            for tokens in parts:
                choice = {"index": 0, "text": "", "finish_reason": None, "logprobs": None, "token_ids": tokens}
                body = json.dumps(
                    {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}
                )
                self.wfile.write((f"data: {body}\n\n" if asked["stream"] else body).encode())
            if asked["stream"]:
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_are_compared_however_they_come(url: str, streams: bool) -> None:
    answers = Answers()
    ask(url, Wish("a", 3, streams), [1, 2, 3], answers)
    ask(url, Wish("b", 3, streams), [1, 2, 4], answers)
    ask(url, Wish("fails", 3, streams), [1, 2, 3], answers)
    assert (answers.done, answers.identical, len(answers.wrong), len(answers.failed)) == (3, 1, 1, 1)
    assert len(_objections(answers, 1, True, 1, [])) == 2


def test_what_fails_is_asked_again_and_what_is_wrong_is_not(url: str) -> None:
    answers = Answers()
    ask(url, Wish("fails once", 3, False), [1, 2, 3], answers, again=2)
    ask(url, Wish("b", 3, False), [1, 2, 4], answers, again=2)
    assert (answers.identical, answers.asked_again, answers.failed, len(answers.wrong)) == (1, 1, [], 1)
    ask(url, Wish("fails", 3, False), [1, 2, 3], answers, again=1)
    assert (answers.asked_again, len(answers.failed)) == (2, 1)


def test_a_run_without_transfers_or_without_the_one_that_joined_is_no_success() -> None:
    assert _objections(Answers(), 2, True, 1, []) == []
    assert "no KV was moved" in _objections(Answers(), 1, True, 0, [])[0]
    assert "joined" in _objections(Answers(), 1, False, 1, [])[0]
    assert "nothing was interrupted" in _objections(Answers(), 0, True, 1, [])[0]


def test_without_the_router_it_says_what_to_install() -> None:
    result = CliRunner().invoke(build(), ["bench", "fleet", "--router", "no-such-router"])
    assert result.exit_code == 2 and "no-such-router" in result.stderr and "pip" in result.stderr
