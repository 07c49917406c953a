"""`kvxfer why` at exchanges: the last fetches, and requests of continuous batching by their ids."""

import json
from contextlib import ExitStack
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer import KvxferError
from kvxfer.cli.main import build
from tests.transformers.conftest import Pair, batch, prefilled
from tests.transformers.test_batching import managers, prompt, results


def why(exchange: Any, *words: str) -> tuple[int, list[dict[str, Any]]]:
    source = exchange._side.scheduler.source
    ran = CliRunner().invoke(build(), ["why", *words, "--decode", f"{source.host}:{source.port}", "--json"])
    return ran.exit_code, json.loads(ran.output)["requests"]


def test_the_last_fetch_that_failed(full: Pair) -> None:
    prompts, others = batch(20), batch(20, seed=1)
    made = prefilled(full.model, prompts)
    ticket = full.producer.offer(made.past_key_values, made.sequences)
    with pytest.raises(KvxferError, match="digest"):
        full.consumer.fetch(ticket, **others)
    code, (found, *_) = why(full.consumer)
    assert code == 1 and found["decode"]["outcome"] == "digest_differs"
    assert "the digests differ" in found["verdict"]["says"]


def test_a_request_of_continuous_batching_by_its_id() -> None:
    with ExitStack() as stack:
        m, ids = managers(stack, "full"), prompt(40)
        m.producer.add_prefill(ids, request_id="chat-7")
        results(m.prefill, "chat-7")
        results(m.decode, m.consumer.add_fetch(m.producer.ticket("chat-7"), ids, request_id="chat-7"))
        code, (found,) = why(m.consumer, "chat-7")
    assert code == 0 and "it was delivered" in found["verdict"]["says"]
    assert found["decode"]["request"].endswith(" of chat-7") and found["prefill"]["request"].endswith(" of chat-7")
