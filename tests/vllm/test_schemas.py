"""Every router's schema moves KV, whichever engine begins first, and leaves nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.cases import check, offers_nothing
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import PlayedEngine, prompt
from tests.vllm.schemas import LOADS, NIXL, SCHEMAS, RouterSchema

overlap = both_ways
DEAD = "127.0.0.1"
EACH = pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
BOTH = pytest.mark.parametrize(
    "schema", [s for s in SCHEMAS.values() if s.both], ids=[k for k, s in SCHEMAS.items() if s.both]
)


def outcomes(d: PlayedEngine) -> list[str]:
    return [outcome for stats in d.stats for outcome, _ in stats["requests"]]


@EACH
@pytest.mark.parametrize("d_first", [False, True], ids=["P first", "D first"])
def test_each_schema_moves_kv(make: Make, schema: RouterSchema, d_first: bool) -> None:
    if d_first and not schema.both:
        pytest.skip("D is asked once P has answered")
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text, request = prompt(150), "3f0b9d0e-5c9e-4f53-9a4c-0123456789ab"
    at_p = None if d_first else p.add(text, schema.asked(request), n=1, name=f"cmpl-{request}-0")
    answer = None
    if at_p is not None:
        p.steps(2)
        if not schema.both:
            p.run(until=at_p)
            answer = p.done[at_p].params
    at_d = d.add(text, schema.told(p, request, answer), name=f"cmpl-{request}-0")
    d.steps(3)
    if d_first:
        p.add(text, schema.asked(request), n=1, name=f"cmpl-{request}-0")
    d.run(p, until=at_d)
    check(d, at_d, text)
    assert d.computed[at_d] == 1 + 3 and outcomes(d) == ["delivered"]
    p.steps(4)
    assert p.free == p.blocks - 1, "P waits for a lease"


@BOTH
def test_samples_share_a_load(make: Make, schema: RouterSchema) -> None:
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text, request = prompt(70), "some-job"
    names = d.samples(text, schema.told(p, request), 2, name=f"cmpl-{request}-0")
    d.steps(2)
    p.samples(text, schema.asked(request), 2, n=1, name=f"cmpl-{request}-0")
    d.run(p)
    for name in names:
        check(d, name, text)
    assert sum(d.computed[name] for name in names) <= 2 * (1 + 3) + 6, "one load serves both"
    p.steps(4)
    assert p.free == p.blocks - 1


def test_a_late_decode_engine_of_the_push_schema(make: Make) -> None:
    """P has answered, to nobody who cares, and holds the blocks."""
    p, d, schema = make(role="kv_producer"), make(role="kv_consumer"), SCHEMAS["push"]
    text = prompt(70)
    at_p = p.add(text, schema.asked("job"), n=1, name="chatcmpl-job")
    p.run(until=at_p)
    at_d = d.add(text, schema.told(p, "job"), name="chatcmpl-job")
    d.run(p, until=at_d)
    check(d, at_d, text)
    assert d.computed[at_d] == 1 + 3


@pytest.mark.parametrize("name", ["job", "cmpl-job-0", "cmpl-job-0-0123abcd"])
def test_the_id_may_be_what_an_engine_has_made_of_it(make: Make, name: str) -> None:
    p, d, schema = make(role="kv_producer"), make(role="kv_consumer"), SCHEMAS["push"]
    text = prompt(70)
    at_d = d.add(text, schema.told(p, name), name="cmpl-another-0")
    d.steps(2)
    p.add(text, schema.asked("job"), n=1, name="cmpl-job-0")
    d.run(p, until=at_d)
    check(d, at_d, text)
    assert d.computed[at_d] == 1 + 3


def test_one_id_for_two_prompts(make: Make) -> None:
    """A client may send its id again: what is offered is named by its content too."""
    p, d, schema = make(role="kv_producer"), make(role="kv_consumer"), SCHEMAS["push"]
    texts = [prompt(70), prompt(90, seed=1)]
    at_d = [d.add(text, schema.told(p, "job"), name="cmpl-job-0") for text in texts]
    d.steps(2)
    for text in reversed(texts):
        p.add(text, schema.asked("job"), n=1, name="cmpl-job-0")
    d.run(p)
    for name, text in zip(at_d, texts, strict=True):
        check(d, name, text)
        assert d.computed[name] == 1 + 3


def test_a_client_that_hangs_up_before_p_has_begun(make: Make) -> None:
    p, d, schema = make(role="kv_producer"), make(role="kv_consumer"), SCHEMAS["push"]
    text = prompt(70)
    at_d = d.add(text, schema.told(p, "job"), name="cmpl-job-0")
    d.steps(2)
    d.abort(at_d)
    d.steps(2)
    at_p = p.add(text, schema.asked("job"), n=1, name="cmpl-job-0")
    p.run(until=at_p)
    offers_nothing(p)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({**LOADS, "transfer_id": "x"}, "remote_host and remote_port are missing"),
        ({**LOADS, "transfer_id": "x", "remote_host": "h"}, "remote_port is missing"),
        ({**LOADS, "transfer_id": "x", "remote_notify_port": 61005}, "remote_host and remote_port are missing"),
        ({**LOADS, "transfer_id": "x", "remote_host": "h", "remote_handshake_port": "p"}, "remote_handshake_port`"),
        ({**LOADS, "transfer_id": "x", "remote_bootstrap_addr": "http://h"}, "remote_port is missing"),
        (
            {**LOADS, "transfer_id": "x", "remote_bootstrap_addr": "http://h:99999"},
            "remote_host and remote_port are missing",
        ),
        ({**LOADS, "transfer_id": "x", "remote_bootstrap_addr": "http://127.0.0.1:0"}, "remote_port is missing"),
        (
            {**LOADS, "transfer_id": "x", "remote_host": DEAD, "remote_handshake_port": 65535, "remote_dp_rank": 1},
            "remote_handshake_port 65535 plus remote_dp_rank is above 65535",
        ),
        ({**LOADS, "transfer_id": True, "remote_host": DEAD, "remote_port": 9}, "transfer_id is not a text"),
        ({**LOADS, "transfer_id": False, "remote_host": DEAD, "remote_port": 9}, "remote_request_id, the X-Request-Id"),
        ({**LOADS, "transfer_id": "x", "remote_host": "prefill-0", "remote_port": 9}, "'prefill-0' is a name"),
        ({**LOADS, "transfer_id": "x", "remote_bootstrap_addr": "http://prefill-0:9"}, "'prefill-0' is a name"),
        ({**LOADS, "remote_host": "127.0.0.1", "remote_port": 9}, "remote_request_id, the X-Request-Id of both"),
        (
            {**LOADS, "remote_host": "127.0.0.1", "remote_port": 9, "remote_request_id": 7},
            "remote_request_id, the X-Request",
        ),
    ],
)
def test_what_is_missing_is_named(
    make: Make, caplog: pytest.LogCaptureFixture, params: dict[str, Any], said: str
) -> None:
    d = make(role="kv_consumer")
    text = prompt(40)
    name = d.add(text, dict(params))
    d.run(until=name)
    check(d, name, text)
    assert said in caplog.text and "computed here" in caplog.text and "Error" not in caplog.text


@pytest.mark.parametrize(
    "odd", [{"remote_host": 7}, {"remote_host": ["h"], "remote_port": "x"}, {"remote_port": 70000}]
)
def test_where_d_is_costs_p_no_offer(make: Make, odd: dict[str, Any]) -> None:
    """P is told who is to load, and need not know where that is."""
    p = make(role="kv_producer")
    name = p.add(prompt(40), {"remote_decoder": {"kv_request_id": "job", **odd}}, n=1)
    p.run(until=name)
    assert p.done[name].params
    p.lease_ends()


def test_no_schema_is_asked_for_more_than_nixl_s() -> None:
    """P's part of a router that relays is NIXL's, to the letter."""
    assert SCHEMAS["relay"].to_p == SCHEMAS["push"].to_p == NIXL


@pytest.mark.parametrize("name", ["relay, known keys", "named", "tier", "push", "moriio"])
def test_a_port_may_be_a_text(make: Make, name: str) -> None:
    """As in routers that hold ports as texts: NIXL's own connector takes them."""
    schema = SCHEMAS[name]
    p, d = make(role="kv_producer"), make(role="kv_consumer")
    text, request = prompt(70), "some-job"
    at_p = p.add(text, schema.asked(request), n=1, name=f"cmpl-{request}-0")
    p.run(until=at_p)
    told = _with_text_ports(schema.told(p, request, p.done[at_p].params))
    told.pop("kvxfer_address", None)
    at_d = d.add(text, told, name=f"cmpl-{request}-0")
    d.run(p, until=at_d)
    check(d, at_d, text)
    assert outcomes(d) == ["delivered"]


def _with_text_ports(params: dict[str, Any]) -> dict[str, Any]:
    return {
        key: str(value) if key.endswith("_port") else _with_text_ports(value) if isinstance(value, dict) else value
        for key, value in params.items()
    }
