"""What routers and clients put into `kv_transfer_params`."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from vllm.v1.engine.output_processor import RequestState

from kvxfer.identity import IdentityError
from kvxfer_vllm.said import external_id, read_params
from tests.control.conftest import until
from tests.vllm.cases import OFFER, both, check, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import HYBRID, prompt
from tests.vllm.wire import Wire

COUNTS_CACHED = "remote_prefill_cached_tokens" in inspect.signature(RequestState).parameters
"""vLLM 0.31 and later add to the params how many tokens P had cached, and look for that."""


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "dispatched at once"])
def test_d_knows_whether_p_has_offered_what_it_loads(make: Make, wire: Wire, answered: bool) -> None:
    """P is asked for no longer than it takes to say that it has forgotten it, but waited for where it may not have begun."""
    p, d = make(budget=16), make()
    text = prompt(60)
    to_p, to_d = both(p, "job")
    params = prefill(p, text) if answered else to_d
    if not answered:
        p.add(text, to_p, n=1)
        p.steps(2)  # of the four that it takes
    wire.paused = True
    name = d.add(text, params)
    until(lambda: bool(d.step() and wire.loads(d)))  # it asks whether P has begun
    [load] = wire.loads(d)
    assert load.fetch.offered == answered
    wire.paused = False
    d.run(p)
    check(d, name, text)


def test_a_load_that_came_too_late_is_counted_as_one(make: Make) -> None:
    p, d = make(), make(extra={"start_timeout": 0.2})
    text = prompt(90)
    name = d.add(text, both(p, "job")[1])
    d.run(p, until=name)
    check(d, name, text)
    assert [outcome for stats in d.stats for outcome, _ in stats["requests"]] == ["never_offered"]


def test_a_producer_with_other_content_is_counted_as_one(make: Make) -> None:
    p, d = make(), make(extra={"start_timeout": 30.0})
    to_p, to_d = both(p, "job")
    name = d.add(prompt(60, seed=1), to_d)
    d.step()
    p.run(until=p.add(prompt(60), to_p, n=1))
    d.run(p, until=name)
    check(d, name, prompt(60, seed=1))
    assert [outcome for stats in d.stats for outcome, _ in stats["requests"]] == ["digest_differs"]
    p.lease_ends()


def test_a_client_that_hangs_up_is_no_router_that_mixes_up(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    """vLLM's front end then makes up a request of one token, under the params of the one that it gives up."""
    p, d = make(), make()
    text, (to_p, to_d) = prompt(60), both(p, "job")
    kept = p.add(text, to_p, n=1)
    p.run(until=kept)
    d.reject(text, to_d, "cmpl-job-0")
    d.steps(3)
    decode(d, text, to_d, p)
    assert "other content" not in caplog.text
    assert [outcome for stats in d.stats for outcome, _ in stats["requests"]] == ["delivered"]


@pytest.mark.parametrize("lost", ["kvxfer_transfer", "kvxfer_epoch", "do_remote_prefill"])
def test_a_router_that_withholds(make: Make, lost: str) -> None:
    """What is missing makes D compute; P's lease runs out."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    del params[lost]
    name = d.add(text, params)
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 60 + 3
    p.lease_ends()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"do_remote_prefill": True},
        {"do_remote_prefill": 1, "remote_host": 7, "remote_port": "x"},
        {
            "do_remote_prefill": True,
            "remote_host": "h",
            "remote_port": 70000,
            "kvxfer_transfer": "x",
            "kvxfer_epoch": "1",
        },
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": 7, "kvxfer_transfer": "x", "kvxfer_epoch": "zz"},
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": 7, "kvxfer_transfer": "x", "kvxfer_epoch": "-1"},
        {
            "do_remote_prefill": True,
            "remote_host": "h",
            "remote_port": 7,
            "kvxfer_transfer": "x",
            "kvxfer_epoch": "f" * 40,
        },
        {"do_remote_prefill": True, "remote_host": "h\udc80", "remote_port": 7, "transfer_id": "x"},
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": 7, "transfer_id": "\udc80"},
        {"do_remote_prefill": True, "remote_host": "h", "remote_port": True, "transfer_id": ["x"]},
        {"do_remote_decode": True, "transfer_id": "\udc80"},
        {"do_remote_decode": "yes", "transfer_id": {"a": 1}},
        {"unknown": object},
        {"remote_prefiller": "x"},
        {"remote_prefiller": {}},
        {"remote_prefiller": {"kv_request_id": "x"}},
        {"remote_prefiller": {"kv_request_id": "x", "remote_host": ["h"], "remote_port": "7"}},
        {"remote_prefiller": {"kv_request_id": ["x"], "remote_host": "h", "remote_port": 7}},
        {"remote_prefiller": {"remote_host": "h", "remote_port": 7}, "do_remote_prefill": True},
        {"remote_decoder": [7]},
        {"remote_decoder": {"kv_request_id": {"a": 1}}},
        {"remote_decoder": {"kv_request_id": "\udc80"}},
        {"remote_decoder": {"kv_request_id": "x"}, "remote_prefiller": {"kv_request_id": "x"}},
        {"remote_kv_source": {"kv_request_id": "x", "remote_host": "h", "remote_port": 7}},
    ],
)
def test_params_that_make_no_sense(make: Make, wire: Wire, params: dict[str, Any]) -> None:
    """predecessor 2.4.3: whatever stands in a request's params, or nothing, it is answered and the engine lives."""
    d = make()
    text = prompt(40)
    name = d.add(text, params)
    d.steps(2)
    for load in wire.loads(d):
        wire.fail(load, "no such engine")
    d.run(until=name)
    check(d, name, text)
    d.lease_ends()


@pytest.mark.parametrize("number", [1 << 64, 10**5000, -(10**5000)], ids=["65 bits", "long", "negative"])
def test_numbers_that_some_vllm_lets_through(number: int) -> None:
    """Releases from 0.32 on refuse them; Python raises where one of more than 4,300 digits is written out."""
    where = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 7}
    with pytest.raises(IdentityError, match="transfer_id is not a text"):
        read_params({**where, "transfer_id": number})
    for key in ("remote_port", "kvxfer_address", "kvxfer_epoch"):
        with pytest.raises(IdentityError, match=key):
            read_params({**where, "kvxfer_transfer": "x", key: number})
    assert read_params({**where, "transfer_id": 7}).wanted(external_id("r-00000000"))[0].base.endswith("7")  # type: ignore[union-attr]


def test_an_answer_is_small_and_says_what_was_cached(make: Make) -> None:
    """At any length; the consumer's usage tells of hits on P."""
    p = make(HYBRID, blocks=160)
    short, long = (prefill(p, prompt(n)) for n in (20, 1500))
    assert len(json.dumps(long)) < len(json.dumps(short)) + 8
    assert long["remote_block_ids"] == [[], []] and long["remote_num_tokens"] == 1500
    assert long["remote_prefill_cached_tokens"] == 16 if COUNTS_CACHED else "remote_prefill_cached_tokens" not in long
    p.lease_ends()


@pytest.mark.parametrize(
    ("host", "port"), [("10.9.8.7", 8100), ("prefill.example", "8100"), ("", 0), (["10.9.8.7"], "http")]
)
def test_a_router_that_overwrites_the_host(make: Make, host: Any, port: Any) -> None:
    """AIBrix writes the pod's address, production-stack the host of its URL: our own key is preferred."""
    p, d = make(), make()
    text = prompt(60)
    params = {**prefill(p, text), "remote_host": host, "remote_port": port}
    name = d.add(text, params)
    d.run(p, until=name)
    check(d, name, text)
    assert d.computed[name] == 1 + 3


HUGE = "x" * (17 << 20)


@pytest.mark.parametrize("key", ["kvxfer_transfer", "kvxfer_epoch", "kvxfer_digest", "kvxfer_address", "transfer_id"])
def test_params_beyond_measure(make: Make, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """They cost their own request its load, and the log a line; honest loads between the same two engines come."""
    p, d = make(), make()
    text = prompt(60)
    params = {**prefill(p, text), key: HUGE}
    honest = [prompt(60, seed=i) for i in range(1, 5)]
    theirs = [prefill(p, other) for other in honest]
    with caplog.at_level("DEBUG"):
        names = [d.add(other, told) for other, told in zip(honest[:2], theirs, strict=False)]
        name = d.add(text, params)
        names += [d.add(other, told) for other, told in zip(honest[2:], theirs[2:], strict=True)]
        for each in (*names, name):
            d.run(p, until=each)
    check(d, name, text)
    for other, own in zip(honest, names, strict=True):
        check(d, own, other)
        assert d.computed[own] == 1 + 3
    assert len(caplog.text) < 10_000
    assert key == "kvxfer_digest" or "takes no part" in caplog.text or "is computed here" in caplog.text
    p.lease_ends()


@pytest.mark.parametrize("params", [None, OFFER], ids=["no transfer", "offers"])
@pytest.mark.parametrize("name", ["x" * 5000, "\ud800"], ids=["long", "no text"])
def test_whatever_a_client_calls_its_request(
    make: Make, name: str, params: dict[str, Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is computed, though nothing can be transferred under such a name; the engine, and other requests, go on."""
    p = make()
    with caplog.at_level("DEBUG"):
        other, named = p.add(prompt(30, seed=1), n=3), p.add(prompt(40), params, n=3, name=name)
        p.run()
    check(p, other, prompt(30, seed=1), 3)
    check(p, named, prompt(40), 3)
    assert p.done[named].params is None
    assert len(caplog.text.encode()) < 10_000  # a log file takes it


@pytest.mark.parametrize(
    "params",
    [
        {"remote_decoder": HUGE},
        {"remote_decoder": {"kv_request_id": HUGE}},
        {"remote_prefiller": {"kv_request_id": HUGE, "remote_host": "h", "remote_port": 7}},
        {"remote_prefiller": {"kv_request_id": "x", "remote_host": HUGE, "remote_port": 7}},
        {"remote_prefiller": {HUGE: HUGE}},
    ],
    ids=range(5),
)
def test_parties_beyond_measure(make: Make, params: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    e, text = make(), prompt(60)
    with caplog.at_level("DEBUG"):
        name = e.add(text, params)
        e.run(until=name)
    check(e, name, text)
    assert len(caplog.text) < 10_000 and ("is not offered" in caplog.text or "is computed here" in caplog.text)


@pytest.mark.parametrize(
    ("role", "asked", "needed"), [("kv_consumer", "offer", "kv_producer"), ("kv_producer", "load", "kv_consumer")]
)
def test_an_engine_that_is_asked_for_what_it_does_not_do(
    make: Make, caplog: pytest.LogCaptureFixture, role: str, asked: str, needed: str
) -> None:
    e, peer = make(role=role), make()
    text = prompt(60)
    params = OFFER if asked == "offer" else prefill(peer, text)
    with caplog.at_level("WARNING", "kvxfer.vllm"):
        name = e.add(text, params)
        e.run(until=name)
    check(e, name, text)
    assert f"asks this engine to {asked} its prompt's KV" in caplog.text and f"kv_role must be {needed}" in caplog.text
    peer.lease_ends()


def test_an_engine_whose_failed_loads_are_errors_says_so(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "kvxfer.vllm"):
        make(policy="recompute")
        assert "kv_load_failure_policy" not in caplog.text
        make(policy="fail")
    assert "kv_load_failure_policy is 'fail'" in caplog.text
