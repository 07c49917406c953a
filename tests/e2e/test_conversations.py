"""Conversations on real servers: tokens are a plain server's, and prefill computes only what no other engine has."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from kvxfer_bench.vllm.conversation import FLAGS, SCHEMAS, Conversation
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import (
    BLOCK,
    MODEL_NAME,
    Cluster,
    Server,
    await_ready,
    connector,
    ended_together,
    free_port,
)
from tests.e2e.conftest import PATIENT
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(560)]

SETTINGS = {**PATIENT, "ask": "always", "ask_timeout": 10.0, "trust_sources": True}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "kvxfer_vllm.nixl",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        **SETTINGS,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 16,
        "decoder_kv_blocks_ttl": 480,
    },
}
ANSWER = 50


def ids(n: int, seed: int) -> list[int]:
    return [33 + (7 * i + 31 * seed + i * i % 13) % 90 for i in range(n)]


def streamed(server: Server, prompt: list[int], tokens: int) -> Generator[int, None, None]:
    """Yield the tokens of an answer as they come. Closed, it hangs up."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True}
    request = Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield from choice.get("token_ids") or ()


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(scope="module")
def servers(cluster: Cluster, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Both ways between prefill and decode, under NixlConnector's name and settings at one of them; and vLLM's default policy."""
    logs = tmp_path_factory.mktemp("conversations")
    with ended_together() as begun:
        for name, transfer in (("prefill", connector("kv_both", SETTINGS)), ("decode", NIXL)):
            begun.append(Forked(name, model, logs, transfer, FLAGS))
        await_ready(begun, 300)
        yield Cluster(cluster.plain, *begun)


def converse(cluster: Cluster, schema: str, seed: int, turns: int = 3) -> None:
    """Prefill computes no more than what is new since the decode server's answer, and a block."""
    talk, text, had = Conversation(cluster.prefill, cluster.decode, schema), ids(70 + 9 * seed, seed), 0
    for number in range(turns):
        turn = talk.turn(text, ANSWER)
        expected = complete(cluster.plain, text, ANSWER).tokens
        assert turn.decode.tokens == expected, f"conversation {seed} turn {number}: wrong tokens"
        if number:
            assert turn.prefill.computed <= len(text) - had + BLOCK, f"conversation {seed} turn {number}"
        had = len(text) + ANSWER
        text = text + expected + ids(21, seed + 100 * number)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_prefill_computes_what_is_new(servers: Cluster, schema: str) -> None:
    base = 10 * list(SCHEMAS).index(schema)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda seed: converse(servers, schema, base + seed), range(4)))


EDITS = {
    "thinking dropped": lambda text, said: text + said[ANSWER // 2 :],
    "a word changed": lambda text, said: [*text[:60], 34, 34, *text[62:], *said],
    "all of it": lambda text, said: ids(len(text) + ANSWER, 77),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_history_that_the_client_has_edited(servers: Cluster, edit: str) -> None:
    seed = 40 + list(EDITS).index(edit)
    text = ids(150, seed)
    talk = Conversation(servers.prefill, servers.decode, "nixl")
    said = talk.turn(text, ANSWER).decode.tokens
    edited = EDITS[edit](text, said) + ids(20, seed + 1)
    turn = talk.turn(edited, ANSWER)
    assert turn.decode.tokens == complete(servers.plain, edited, ANSWER).tokens
    assert turn.prefill.computed <= len(edited) - common(edited, text + said) + BLOCK
    assert turn.prefill.computed >= min(len(edited), len(edited) - common(edited, text + said))


def test_sources_that_are_not_there(servers: Cluster) -> None:
    """A port where nobody listens, an HTTP server, and hints that cannot be read."""
    http = servers.plain.url.removeprefix("http://")
    for number, hint in enumerate(
        [
            {"kvxfer_sources": ["127.0.0.1:9", "[::1]:9"]},
            {"kvxfer_sources": [http]},
            {"remote_kv_source": {"kv_request_id": "x", "remote_host": "no.such.host.invalid", "remote_port": 7}},
            {"kv_hint": {"actions": [{"action_type": "kv.fetch"}]}, "kvxfer_sources": 7},
        ]
    ):
        text = ids(120, 60 + number)
        found = complete(servers.prefill, text, 1, {**PREFILL_PARAMS, **hint})
        assert found.computed == 120
        assert found.tokens == complete(servers.plain, text, 1).tokens
    assert "kv_hint names no engine to ask" in servers.prefill.log.read_text()


def test_a_source_that_has_lost_it_and_one_that_leaves(servers: Cluster, model: Path, tmp_path: Path) -> None:
    """Its cache is reset, or overrun. Asked to stop, it lets what it has begun go on elsewhere. Then another is at its address."""
    settings = {**SETTINGS, "port": free_port()}
    flags = [*FLAGS, "--num-gpu-blocks-override", "70", "--shutdown-timeout", "240"]
    with ended_together() as begun:

        def start(name: str) -> Server:
            begun.append(
                Forked(name, model, tmp_path, connector("kv_both", settings), flags, {"VLLM_SERVER_DEV_MODE": "1"})
            )
            await_ready(begun[-1:], 300)
            return begun[-1]

        def computed(seed: int, lose: Callable[[], object]) -> int:
            """How many tokens of the answer and the next question prefill computes, after the source has lost what it had."""
            talk, text = Conversation(servers.prefill, d, "nixl"), ids(160, seed)
            text = text + talk.turn(text, ANSWER).decode.tokens + ids(20, seed + 1)
            lose()
            turn = talk.turn(text, ANSWER)
            assert turn.decode.tokens == complete(servers.plain, text, ANSWER).tokens
            return turn.prefill.computed

        d = start("small")
        assert computed(400, lambda: None) <= 20 + BLOCK
        assert computed(402, lambda: d.post("/reset_prefix_cache", {})) == ANSWER + 20
        assert computed(404, lambda: [complete(d, ids(400, 410 + n), 1) for n in range(6)]) == ANSWER + 20

        talk, history = Conversation(servers.prefill, d, "nixl"), ids(160, 420)
        history = history + talk.turn(history, ANSWER).decode.tokens + ids(20, 421)
        text = ids(160, 422)
        answer = streamed(d, text, 900)
        text = text + [next(answer) for _ in range(70)]
        d.ask_to_stop()
        text = text + [next(answer) for _ in range(30)]  # what runs goes on
        answer.close()
        found = complete(servers.decode, text, ANSWER, {"kvxfer_sources": [f"127.0.0.1:{settings['port']}"]})
        assert found.tokens == complete(servers.plain, text, ANSWER).tokens
        assert found.computed <= BLOCK
        assert d.ended(120), "nothing is left to wait for"

        told, talk = talk.told, Conversation(servers.prefill, start("its-successor"), "nixl")
        talk.told = told
        turn = talk.turn(history, ANSWER)
        assert turn.decode.tokens == complete(servers.plain, history, ANSWER).tokens
        assert turn.prefill.computed == ANSWER + 20
