"""What routers and clients put into `kv_transfer_params`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.cases import CACHES, both, check, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import prompt
from tests.vllm.wire import Wire


@CACHES
@pytest.mark.parametrize("first", ["p", "d"])
def test_both_dispatched_at_once(make: Make, groups: Any, first: str) -> None:
    p, d = make(groups, budget=32), make(groups)
    text = prompt(90)
    to_p, to_d = both(p, "job")
    if first == "d":
        b = d.add(text, to_d)
        d.steps(3)
        p.add(text, to_p, n=1)
    else:
        p.add(text, to_p, n=1)
        p.steps(2)
        b = d.add(text, to_d)
    d.run(p, until=b)
    check(d, b, text)
    assert d.computed[b] == 1 + 3


def test_a_router_that_repeats(make: Make) -> None:
    """The same params to D again, at once and later: one load, and right tokens for all."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    names = [d.add(text, params), d.add(text, params)]
    d.run(p)
    names.append(d.add(text, params))
    d.run(p)
    for name in names:
        check(d, name, text)


def test_a_router_that_mixes_up(make: Make) -> None:
    """D's prompt is not that of the params: the digests differ, and D computes. P keeps its blocks for a lease."""
    p, d = make(), make()
    params, other = prefill(p, prompt(60)), prompt(60, seed=1)
    name = d.add(other, params)
    d.run(p, until=name)
    check(d, name, other)
    assert d.computed[name] == 60 + 3
    p.lease_ends()


@pytest.mark.parametrize("lost", ["remote_host", "remote_port", "kvxfer_transfer", "kvxfer_epoch", "do_remote_prefill"])
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
