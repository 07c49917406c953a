"""A router gives a transfer up: it sends P's answer with a prompt of one token, to any engine. P's blocks are free at once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.cases import check, decode, offers_nothing, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.schemas import NIXL, SCHEMAS, RouterSchema

overlap = both_ways
EACH = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)


def answered(p: PlayedEngine, schema: RouterSchema, text: list[int], request: str = "job") -> dict[str, Any]:
    name = p.add(text, schema.asked(request), n=1, name=f"cmpl-{request}-0")
    p.run(until=name)
    params = p.done[name].params
    assert params is not None and p.free < p.blocks - 1
    return params


@EACH
@pytest.mark.parametrize("to", ["p", "d", "another p"])
def test_nothing_waits_for_a_lease(make: Make, schema: RouterSchema, to: str) -> None:
    p, d, other = make(role="kv_producer"), make(role="kv_consumer"), make(role="kv_producer")
    params = answered(p, schema, prompt(90))
    engine = {"p": p, "d": d, "another p": other}[to]
    name = engine.add([7], params, n=1)
    engine.run(p, until=name)
    check(engine, name, [7], 1)
    offers_nothing(p)
    assert not any(load for stats in d.stats for load in stats["loads"]), "no KV was moved"


def test_what_another_has_asked_for_stays(make: Make) -> None:
    """A digest that does not fit gives nothing up, nor does an answer of an earlier request."""
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text = prompt(90)
    params = prefill(p, text)
    wrong = {**params, "kvxfer_digest": "00" * 16}
    name = p.add([7], wrong, n=1)
    p.run(until=name)
    p.steps(4)
    decode(d, text, params, p)
    assert [outcome for stats in d.stats for outcome, _ in stats["requests"]] == ["delivered"]


def test_all_of_a_batch_is_given_up(make: Make) -> None:
    p = make(role="kv_producer")
    names = [p.add(prompt(60 + i, seed=i), dict(NIXL), n=1, name=f"cmpl-batch-{i}", arrival_time=5.0) for i in range(3)]
    for name in names:
        p.run(until=name)
    params = p.done[names[0]].params
    name = p.add([7], params, n=1)
    p.run(until=name)
    offers_nothing(p)


def test_twice_is_no_more_than_once(make: Make) -> None:
    """Two clients have asked for one prompt; the router drops one of them, and says so twice."""
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text = prompt(90)
    first, second = prefill(p, text), prefill(p, text)
    for _ in range(2):
        name = p.add([7], first, n=1)
        p.run(until=name)
        p.steps(3)
    decode(d, text, second, p)
    offers_nothing(p)


def test_a_producer_is_told_of_a_wrong_role_as_ever(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    p, other = make(role="kv_producer"), make(role="kv_producer")
    text = prompt(60)
    name = other.add(text, prefill(p, text), n=1)
    other.run(p, until=name)
    assert "kv_role does not allow" in caplog.text
    p.lease_ends()
