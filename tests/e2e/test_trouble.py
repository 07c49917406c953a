"""The bounds of docs/guarantees.md on real servers: a prefill server that is stopped for 20 s, killed, and started again where it was."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Server, await_ready, connector, ended_together, free_port
from tests.e2e.forked import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(420)]

SILENCE_S = 4.0
STOP_S = 20.0
BUSY_S = 10.0
"""What a busy host, and computing the prompt, may add to a bound; without the bounds a load takes ``transfer_timeout``."""
CONFIG: dict[str, Any] = {"peer_timeout": SILENCE_S, "transfer_timeout": 60.0, "lease": 120.0}


@dataclass(frozen=True)
class Offered:
    """A prompt that a prefill server has computed: the answer to it, and what a decode server is told."""

    text: str
    tokens: list[int]
    params: dict[str, Any] | None


def offered(prefill: Server, what: str) -> list[Offered]:
    texts = [f"a prompt whose server is {what} before anybody has fetched it, " * 3 + str(n) for n in range(6)]
    return [
        Offered(text, complete(prefill, text, 4).tokens, complete(prefill, text, 1, PREFILL_PARAMS).kv_transfer_params)
        for text in texts
    ]


def asked(decode: Server, offers: list[Offered]) -> list[float]:
    """Have the decode server answer them, one after the other, and return the seconds of each."""
    took = []
    for offer in offers:
        began = time.monotonic()
        tokens = complete(decode, offer.text, 4, offer.params).tokens
        took.append(time.monotonic() - began)
        assert tokens == offer.tokens
    return took


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    logs = tmp_path_factory.mktemp("trouble")
    with ended_together() as begun:

        def begin(name: str, role: str, http: int | None = None, **more: Any) -> Server:
            settings = {**connector(role, {**CONFIG, **more}), "kv_load_failure_policy": "recompute"}
            server = Forked(name, model, logs, settings, port=http)
            begun.append(server)
            return server

        yield begin


def soon(took: list[float]) -> None:
    """The first finds out, the others know; of these the best shows what they wait for, the rest what else was running: a stall of
    the host delays one, since they come one after the other."""
    first, *later = took
    assert first < SILENCE_S + 1 + BUSY_S, took
    assert min(later) < 1.0 and sorted(later)[-2] < SILENCE_S and max(later) < SILENCE_S + 1 + BUSY_S, took


def loads(prefill: Server, decode: Server, what: str) -> None:
    """A server that was in trouble is asked every second whether it lives; one of the next requests gets its KV from it."""
    before = received(decode).tokens
    for offer in [offer for _ in range(3) for offer in offered(prefill, what)]:
        asked(decode, [offer])
        if received(decode).tokens > before:
            return
        time.sleep(1.0)
    raise AssertionError(f"no KV came from the server that is {what}")


def test_stopped_killed_and_started_again(start: Any) -> None:
    http, directory = free_port(), free_port()
    mortal = start("mortal", "kv_producer", http, port=directory)
    decode = start("decode-in-trouble", "kv_consumer")
    await_ready([mortal, decode], 300)
    loads(mortal, decode, "well")

    offers = offered(mortal, "stopped")
    mortal.pause()
    began = time.monotonic()
    try:
        soon(asked(decode, offers))
        time.sleep(max(0.0, began + STOP_S - time.monotonic()))
    finally:
        mortal.resume()
    loads(mortal, decode, "there again")

    offers, later = offered(mortal, "killed"), offered(mortal, "replaced")
    mortal.kill()
    soon(asked(decode, offers))

    successor = start("successor", "kv_producer", http, port=directory)
    await_ready([successor], 300)
    took = asked(decode, later)  # at its address is another by now, which answers at once
    assert sorted(took)[-2] < SILENCE_S + 1 and max(took) < SILENCE_S + 1 + BUSY_S, took
    loads(successor, decode, "started again")
