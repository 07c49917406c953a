"""A request is a stranger: whatever it says, it costs itself its part in KV transfer, and nobody else anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams

from tests.vllm.cases import check
from tests.vllm.conftest import Make
from tests.vllm.engine import prompt
from tests.vllm.test_hints import HOLDER, TIER, envelope

DEAD = "127.0.0.1"
"""Where nobody listens: no request of these goes further than this host."""
SAID: list[dict[str, Any]] = [
    {},
    {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None},
    {"do_remote_decode": True, "transfer_id": "job"},
    {"do_remote_prefill": True, "transfer_id": "job", "remote_host": DEAD, "remote_port": 9},
    {"do_remote_prefill": True, "transfer_id": 7, "remote_host": DEAD, "remote_handshake_port": 9, "remote_dp_rank": 0},
    {"do_remote_prefill": True, "transfer_id": "job", "remote_bootstrap_addr": f"http://{DEAD}:9"},
    {"do_remote_prefill": True, "remote_request_id": "cmpl-x-0-deadbeef", "remote_host": DEAD, "remote_port": 9},
    {
        "do_remote_prefill": True,
        "kvxfer_transfer": "own/1/x",
        "kvxfer_epoch": "1",
        "kvxfer_digest": "00" * 16,
        "kvxfer_address": f"{DEAD}:9",
        "kvxfer_facts": "f",
        "remote_num_tokens": 30,
        "remote_request_id": "r",
    },
    {"remote_prefiller": {"kv_request_id": "job", "remote_host": DEAD, "remote_port": 9}},
    {"remote_decoder": {"kv_request_id": "job"}, "remote_kv_source": {**TIER, "remote_host": DEAD}},
    {**HOLDER, "remote_host": DEAD, "kvxfer_address": f"{DEAD}:9"},
    {"kvxfer_sources": [f"{DEAD}:9", f"{DEAD}:10"]},
    {"kv_hint": envelope(f"tcp://{DEAD}:9")},
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.sampled_from([10**4000, float("nan"), float("inf"), "", "x" * 5000, "\ud800", "a\x00\n"])
    | st.floats()
    | st.text(max_size=8)
)
ODD = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """Return what a router sends, with odd values at some places of it."""
    said = copy.deepcopy(draw(st.sampled_from(SAID)))
    for _ in range(draw(st.integers(0, 3))):
        said |= copy.deepcopy({key: value for key, value in draw(st.sampled_from(SAID)).items() if draw(st.booleans())})
    for _ in range(draw(st.integers(1, 3))):
        at: Any = said
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(at[key], dict | list) and at[key] and draw(st.booleans()):
                at = at[key]
                continue
            at[key] = draw(ODD)
            break
    return said


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_nothing_that_a_request_says_ends_the_engine(make: Make, role: str) -> None:
    """The next request finds the engine as it was. Each is answered, and rightly."""
    quick = {"start_timeout": 0.01, "transfer_timeout": 0.1, "peer_timeout": 0.1, "lease": 0.05, "ask_timeout": 0.01}
    engine = make(role=role, extra=quick)
    text = prompt(40)

    @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mutated() | st.sampled_from(["text", 7, [], [1], True]))
    def answers(said: Any) -> None:
        try:
            SamplingParams(extra_args={"kv_transfer_params": said})
        except Exception:  # vLLM refuses the request at its front end, by an error whose name releases change
            reject()
        name = engine.add(text, said, n=1, name="cmpl-one-0")
        engine.run(until=name)
        check(engine, name, text, 1)
        engine.lease_ends()

    answers()


@pytest.mark.parametrize(
    "said",
    [
        {"kv_hint": {"actions": [{"action_type": {}}]}},
        {"kv_hint": {"actions": [{"action_type": "kv.fetch", "action_version": [[]] * 3}]}},
        {"do_remote_decode": {}, "remote_decoder": []},
    ],
)
def test_what_once_ended_one(make: Make, said: dict[str, Any]) -> None:
    engine = make()
    name = engine.add(prompt(40), said)
    engine.run(until=name)
    check(engine, name, prompt(40))


def test_a_fault_of_ours_costs_the_request_only(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is raised while a request is read: it takes no part, which the log says."""

    def fails(*args: Any, **named: Any) -> Any:
        raise ZeroDivisionError

    p = make()
    for what in ("digest", "named"):
        monkeypatch.setattr(f"kvxfer_vllm.content.RequestContent.{what}", fails)
        name = p.add(prompt(40), {"do_remote_decode": True})
        p.run(until=name)
        check(p, name, prompt(40))
        assert p.done[name].params is None
