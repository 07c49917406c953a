"""Hints of engines that may hold a prefix, in the schemas of today's routers; whatever stands there, no request fails of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.identity import Address, Source
from kvxfer_vllm.said import MAX_SAID, MAX_SOURCES, HintNotes, Hints, held_answer, hints_of

D = Address("10.0.0.7", 5600)
HOLDER = held_answer(Source(D.host, D.port, 77), "engine-d", "cmpl-1-0-deadbeef", 1, 2, 140)
TIER = {"kv_request_id": "x", "remote_host": "10.0.0.8", "remote_port": 5710}


def envelope(endpoint: Any, **more: Any) -> dict[str, Any]:
    """What Dynamo's router sends (`lib/kv-router`), with hashes that are of no use here."""
    payload = {"source_control_endpoint": endpoint, "block_hashes": [17, 1 << 63]}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload, **more}
    return {"protocol_version": "0.1", "message_id": "m", "actions": [action]}


@pytest.mark.parametrize(
    ("params", "kind", "sources"),
    [
        (HOLDER, "nixl", [D]),
        # The example router for conversations overwrites the host with that of D's HTTP server.
        ({**HOLDER, "remote_host": "localhost"}, "nixl", [D]),
        # A router that passes on the keys that it knows.
        ({k: v for k, v in HOLDER.items() if not k.startswith("kvxfer")}, "nixl", [D]),
        ({"remote_kv_source": TIER}, "remote_kv_source", [Address("10.0.0.8", 5710)]),
        (
            {"remote_kv_source": TIER, "remote_decoder": {"kv_request_id": "x"}},
            "remote_kv_source",
            [Address("10.0.0.8", 5710)],
        ),
        ({"remote_kv_source": {**TIER, "remote_port": "5710"}}, "remote_kv_source", [Address("10.0.0.8", 5710)]),
        ({"remote_kv_source": TIER, **HOLDER}, "remote_kv_source", [Address("10.0.0.8", 5710), D]),
        ({"kv_hint": envelope("tcp://10.0.0.9:23280")}, "kv_hint", [Address("10.0.0.9", 23280)]),
        ({"kv_hint": envelope("tcp://[fd00::7]:1")}, "kv_hint", [Address("fd00::7", 1)]),
        ({"kv_hint": envelope("localhost:1", action_type="kv.source_locations")}, "kv_hint", [Address("localhost", 1)]),
        ({"kv_hint": {"protocol_version": "0.1", "message_id": "m", "actions": []}}, "", []),
        ({"kv_hint": envelope("tcp://worker-a:1", action_type="kv.evict")}, "", []),
        ({"kvxfer_sources": ["10.0.0.7:5600", "[::1]:1", "10.0.0.7:5600"]}, "kvxfer_sources", [D, Address("::1", 1)]),
        (
            {"kvxfer_sources": ["10.0.0.6:1"], "remote_kv_source": TIER},
            "kvxfer_sources",
            [Address("10.0.0.6", 1), Address("10.0.0.8", 5710)],
        ),
        # What P answers to D, and what a router sends to P at a first turn, name nobody to ask.
        (
            {
                "do_remote_prefill": True,
                "remote_host": "10.0.0.7",
                "remote_port": 5600,
                "kvxfer_address": "10.0.0.7:5600",
            },
            "",
            [],
        ),
        ({"do_remote_decode": True, "transfer_id": "x", "remote_host": "d", "remote_handshake_port": 6301}, "", []),
        ({"do_remote_decode": True, "remote_host": None, "remote_port": None, "remote_engine_id": None}, "", []),
        ({}, "", []),
    ],
)
def test_who_is_named(params: dict[str, Any], kind: str, sources: list[Address]) -> None:
    assert hints_of(params) == Hints(tuple(sources), kind)
    assert hints_of(json.loads(json.dumps(params))) == Hints(tuple(sources), kind)


@pytest.mark.parametrize(
    ("params", "key"),
    [
        ({"remote_kv_source": "x"}, "remote_kv_source"),
        ({"remote_kv_source": {}}, "remote_kv_source"),
        ({"remote_kv_source": {**TIER, "remote_port": True}}, "remote_kv_source"),
        ({"remote_kv_source": {**TIER, "remote_port": 10**5000}}, "remote_kv_source"),
        ({"remote_kv_source": {**TIER, "remote_host": "x" * (17 << 20)}}, "remote_kv_source"),
        ({"remote_kv_source": {**TIER, "remote_host": "h\udc80"}}, "remote_kv_source"),
        ({"do_remote_decode": True, "remote_port": 7}, "remote_host"),
        ({"do_remote_decode": True, "kvxfer_address": 7}, "remote_host"),
        ({"kvxfer_sources": "10.0.0.7:5600"}, "kvxfer_sources"),
        ({"kvxfer_sources": [None]}, "kvxfer_sources"),
        ({"kvxfer_sources": {"a": 1}}, "kvxfer_sources"),
        # Names, which nobody looks up.
        ({"kvxfer_sources": ["worker-a:1"]}, "kvxfer_sources"),
        ({"remote_kv_source": {**TIER, "remote_host": "worker-a"}}, "remote_kv_source"),
        ({"do_remote_decode": True, "kvxfer_address": "worker-a:1"}, "remote_host"),
        ({"kv_hint": envelope("tcp://worker-a:1")}, "kv_hint"),
        ({"kv_hint": []}, "kv_hint"),
        ({"kv_hint": {"actions": 7}}, "kv_hint"),
        ({"kv_hint": envelope(None)}, "kv_hint"),
        ({"kv_hint": envelope("tcp://x")}, "kv_hint"),
        ({"kv_hint": envelope("tcp://x:1", action_version="2.0")}, "kv_hint"),
        ({"kv_hint": envelope("tcp://x:1", payload=None)}, "kv_hint"),
        ({"remote_kv_sources": TIER}, "remote_kv_sources"),
        ({"kvxfer_sources": [f"10.0.0.1:{n}" for n in range(1, 30)]}, "kvxfer_sources"),
    ],
)
def test_what_is_not_used_is_named(params: dict[str, Any], key: str) -> None:
    hints = hints_of({**params, "remote_kv_source": params.get("remote_kv_source", TIER)})
    assert [name for name, _ in hints.notes] == [key]
    assert all(len(why) < 500 for _, why in hints.notes)
    assert len(hints.sources) == 0 if "remote_kv_source" in params else 1 <= len(hints.sources) <= MAX_SOURCES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=10,
)
KEYS = st.sampled_from(
    [
        "do_remote_decode",
        "remote_host",
        "remote_port",
        "kvxfer_address",
        "kvxfer_sources",
        "remote_kv_source",
        "kv_hint",
    ]
)
FORMS = st.one_of(
    JSON,
    st.builds(lambda host, port: {"remote_host": host, "remote_port": port}, JSON, JSON),
    st.builds(lambda endpoint, version: envelope(endpoint, action_version=version), JSON, JSON),
    st.lists(st.text(max_size=20), max_size=12),
)


@given(st.dictionaries(KEYS | st.text(max_size=10), FORMS))
def test_nothing_that_can_be_sent_raises(params: dict[str, Any]) -> None:
    """And whoever is asked is at an address that can be dialled."""
    hints = HintNotes().read(params)
    assert len(hints.sources) <= MAX_SOURCES and len(set(hints.sources)) == len(hints.sources)
    assert bool(hints.kind) == bool(hints.sources)
    for where in hints.sources:
        Source(where.host, where.port, 0)


def test_a_key_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    notes = HintNotes()
    for _ in range(3):
        notes.read({"kv_hints_v2": {"a": 1}, "kv_hint": 7, "nothing": None})
    assert caplog.text.count("kv_hints_v2") == caplog.text.count("kv_hint names no engine to ask: ") == 1
    assert "nothing" not in caplog.text
    for n in range(10 * MAX_SAID):
        notes.read({f"key{n}" + "x" * 10_000: 1})
    assert len(caplog.records) == MAX_SAID and len(caplog.text) < 1000 * MAX_SAID
