"""Names of media that clients use twice: vLLM may take one item for another, so nothing that may hold the wrong one is moved."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from tests.vllm.cases import OFFER
from tests.vllm.conftest import Make
from tests.vllm.engine import PlayedEngine, ours, prompt
from tests.vllm.test_conversations import named, rest
from tests.vllm.test_digest import ask, engine, image


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """A request with both images."""
    return {"mm_features": first["mm_features"] + second["mm_features"]}


def is_offered(p: PlayedEngine, name: str) -> bool:
    p.run(until=name)
    found = p.done[name].params is not None
    rest(p)
    return found


def test_all_names_of_a_request_count_whatever_is_wrong_with_one(make: Make) -> None:
    p = engine(make)
    assert is_offered(p, ask(p, OFFER, 1, image(1, name="x")))
    assert not is_offered(p, ask(p, OFFER, 1, two(image(2, name="x"), image(3, offset=30, name="y"))))
    assert not is_offered(p, ask(p, OFFER, 1, image(4, name="y")))


def test_a_session_counts_as_well(make: Make) -> None:
    """It takes no part in transfers, but vLLM caches what it makes of an image."""
    p = engine(make)
    session = Request(
        "s-12345678",
        prompt(60),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=p.hasher,
        resumable=True,
        **image(1, name="x"),
    )
    p.scheduler.add_request(session)
    p.steps(3)
    name = ask(p, OFFER, 1, image(2, name="x"))
    p.run(until=name)
    p.abort("s-12345678")
    assert not is_offered(p, name)


def test_one_that_waits_when_another_comes(make: Make) -> None:
    """vLLM may have encoded the other one first, by its priority."""
    p = engine(make)
    waits = ask(p, OFFER, 1, image(1, name="x"))
    other = ask(p, OFFER, 1, {**image(2, name="x"), "tokens": prompt(60, seed=3)})
    beside = ask(p, OFFER, 1, {**image(2, name="y"), "tokens": prompt(60, seed=4)})
    p.run(until=beside)
    assert [p.done[name].params is not None for name in (waits, other, beside)] == [False, False, True]
    rest(p)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_computed_before_is_not_found(make: Make, again: bool) -> None:
    """Its blocks may have been evicted since, and computed again from the other image under the same hashes. The text before is found."""
    p, d = (engine(make, blocks=120) for _ in range(2))
    text = prompt(100)
    p.run(until=ask(p, {}, 1, {**image(1, offset=40, name="x"), "tokens": text}))
    if again:
        p.scheduler.reset_prefix_cache()
        p.scheduler.encoder_cache_manager.reset()
        p.run(until=ask(p, {}, 1, {**image(2, offset=40, name="x"), "tokens": text}))
    name = ask(d, {"kvxfer_sources": named(p)["kvxfer_sources"]}, 1, {**image(1, offset=40), "tokens": text})
    d.run(p, until=name)
    assert d.loaded == (32 if again else 96)
    rest(p, d)
    assert not len(ours(p.scheduler.connector)._sched)
