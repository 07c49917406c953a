"""Real SGLang servers without a GPU, with kvxfer between them: the tokens are those of a plain server, whatever is aborted."""

import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import pytest

from kvxfer.testing.engine import until
from kvxfer_bench.sglang.servers import GENERATE, SglangPair, abort, ask_pair, generated, room_of, sampling
from kvxfer_vllm.demo.servers import Server
from tests.conftest import require
from tests.e2e.sglang_pair import CHECKED, Stage, complaints, expected, is_idle, prompt, ready, serves, staged

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

TOKENS = 16
END_S = 60.0
"""On a busy machine a request ends within that; SGLang's own time for one that nobody answers is five minutes."""
LENGTHS = (1, 15, 16, 40, 257, 900)
"""Less than a page, a page, some pages, and several chunks of 256."""


@pytest.fixture(scope="module")
def stage(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    require("sglang")
    with staged(model, tmp_path_factory.mktemp("sglang")) as stage:
        yield stage


@pytest.fixture(scope="module")
def servers(stage: Stage) -> tuple[Server, SglangPair, SglangPair]:
    """A plain server, a pair, and the same prefill server with another decode server that has a radix cache."""
    plain, pair = stage.plain(), stage.pair(*CHECKED)
    cached = stage.again(pair, "decode", *CHECKED, "--disaggregation-decode-enable-radix-cache")
    ready(plain, pair.prefill, pair.decode, cached.decode)
    return plain, pair, cached


@pytest.fixture
def plain(servers: tuple[Server, SglangPair, SglangPair]) -> Server:
    return servers[0]


@pytest.fixture
def pair(servers: tuple[Server, SglangPair, SglangPair]) -> Iterator[SglangPair]:
    """The pair; after the test both servers hold nothing, and have nothing to complain of."""
    yield servers[1]
    for server in (servers[1].prefill, servers[1].decode):
        is_idle(server)
        assert not complaints(server)


@pytest.fixture
def cached(servers: tuple[Server, SglangPair, SglangPair]) -> SglangPair:
    return servers[2]


@pytest.mark.parametrize("length", LENGTHS)
def test_one_by_one(stage: Stage, plain: Server, pair: SglangPair, length: int) -> None:
    ids = prompt(length, length)
    asked = ask_pair(stage.threads, pair, ids, TOKENS)
    assert asked.tokens() == expected(plain, ids, TOKENS)
    assert len(generated(asked.prefill.result())) == 1, "the prefill server makes the first token only"


def test_at_once(stage: Stage, plain: Server, pair: SglangPair) -> None:
    prompts = [prompt(100 + n, n) for n in (*LENGTHS, 130, 600)]
    asked = [ask_pair(stage.threads, pair, ids, TOKENS) for ids in prompts]
    assert [one.tokens() for one in asked] == [expected(plain, ids, TOKENS) for ids in prompts]


def test_a_batch(stage: Stage, plain: Server, pair: SglangPair) -> None:
    prompts = [prompt(200 + n, n) for n in (9, 40, 300)]
    answers = ask_pair(stage.threads, pair, prompts, TOKENS).decode.result()
    assert list(map(generated, answers)) == [expected(plain, ids, TOKENS) for ids in prompts]


def test_pages_that_decode_has_cached_are_not_moved(stage: Stage, plain: Server, cached: SglangPair) -> None:
    begun = prompt(300, 330)
    for ids in (begun, begun, begun + prompt(301, 90), begun[:100]):
        asked = ask_pair(stage.threads, cached, ids, TOKENS)
        assert asked.tokens() == expected(plain, ids, TOKENS)
    cached_tokens = asked.decode.result()["meta_info"]["cached_tokens"]
    assert cached_tokens >= 80, "decode has found its own pages"
    assert not complaints(cached.decode)


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
def test_aborts_at_any_moment(stage: Stage, plain: Server, pair: SglangPair, who: str) -> None:
    """Whatever is aborted ends at both servers at once, and the next requests are served."""
    chosen = random.Random(who)
    for after in (0.0, 0.02, 0.1, 0.2, 0.4, 0.8):
        asked = ask_pair(stage.threads, pair, prompt(chosen.randrange(1 << 30), 900), 200)
        time.sleep(after)
        if who != "decode":
            abort(pair.prefill, f"{asked.rid}-p")
        if who != "prefill":
            abort(pair.decode, f"{asked.rid}-d")
        ends = {"prefill": asked.prefill, "decode": asked.decode}
        done = wait(ends.values(), END_S).done  # with tokens, or an error
        assert len(done) == 2, (
            f"aborted after {after} s: no end at {[at for at, end in ends.items() if end not in done]}"
        )
    serves(stage, pair, plain, seed=chosen.randrange(1 << 30))


def test_a_request_that_prefill_aborts_before_decode_asks_for_it(stage: Stage, plain: Server, pair: SglangPair) -> None:
    room = room_of(pair)
    body = sampling(prompt(400, 300), TOKENS, **room)
    first = stage.threads.submit(pair.prefill.post, GENERATE, {**body, "rid": "early"})
    time.sleep(0.3)
    abort(pair.prefill, "early")
    ends(first)
    ends(stage.threads.submit(pair.decode.post, GENERATE, {**body, "rid": "late"}))
    serves(stage, pair, plain, seed=401)


def test_servers_that_die_and_come_again(
    stage: Stage, plain: Server, servers: tuple[Server, SglangPair, SglangPair]
) -> None:
    """A request at the server that is left ends with an error, and the next ones are served by its successor.

    This is the last test of the module: it leaves other servers than the ones that it began with.
    """
    pair, long = servers[1], prompt(500, 1900)
    for role in ("prefill", "decode"):
        if getattr(pair, role).ended(0.0):  # a first try of this test has left it so
            pair = stage.again(pair, role, *CHECKED)
            ready(getattr(pair, role))
    asked = ask_pair(stage.threads, pair, long, 100)
    time.sleep(0.3)
    pair.decode.kill()
    pair = stage.again(pair, "decode", *CHECKED)
    ends(asked.prefill)  # which prefill gives up after a while
    ready(pair.decode)
    serves(stage, pair, plain, seed=501)

    asked = ask_pair(stage.threads, pair, long, 100)
    time.sleep(0.3)
    pair.prefill.kill()
    ends(asked.decode)
    # What SGLang knows of a prefill server it keeps until two heartbeats have found nobody there.
    until(lambda: "Lost connection with prefill instance" in pair.decode.log.read_text(), 30.0)
    pair = stage.again(pair, "prefill", *CHECKED)
    ready(pair.prefill)
    serves(stage, pair, plain, seed=502)
    for server in (pair.prefill, pair.decode):
        is_idle(server)
    for server in (pair.prefill, pair.decode):
        server.ask_to_stop()
    for server in (pair.prefill, pair.decode):
        assert server.ended(END_S), f"{server.name} does not end"
        assert not [line for line in complaints(server) if "kvxfer" in line]
        assert "Exception in thread kvxfer" not in server.log.read_text(), "its threads end without a word"


def ends(answer: Future[Any]) -> None:
    """Check that an answer comes, be it an error."""
    assert wait([answer], END_S).done, f"no end within {END_S:g} s"
