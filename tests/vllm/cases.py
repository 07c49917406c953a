"""What many tests of the states begin or end with."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.vllm.engine import ALIGNED, CHUNKED, DRAFTING, FULL, HYBRID, STATEFUL, Group, PlayedEngine, answer, prompt
from tests.vllm.wire import Load, Wire

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
CACHES = pytest.mark.parametrize(
    "groups",
    [FULL, HYBRID, (Group(window=24),), STATEFUL, ALIGNED, DRAFTING, CHUNKED],
    ids=["full", "hybrid", "window", "stateful", "aligned", "drafting", "chunked"],
)
RUNNERS = pytest.mark.parametrize("resumes_as_new", [False, True], ids=["runner1", "runner2"])


def prefill(p: PlayedEngine, text: list[int], n: int = 1, **more: Any) -> dict[str, Any]:
    """Have P compute a prompt; the params that its router gives to D."""
    name = p.add(text, OFFER, n=n, **more)
    p.run(until=name)
    p.step()  # which tells the workers that it is finished
    params = p.done[name].params
    assert params is not None and params["do_remote_prefill"]
    return params


def load_that_fails(
    d: PlayedEngine, wire: Wire, text: list[int], params: dict[str, Any], quiet: bool = True
) -> tuple[str, Load]:
    """Have D begin to load a prompt, and break the link; its request, and the load."""
    wire.paused = True
    name = d.add(text, params, n=12)
    d.steps(2)
    (failing,) = wire.loads(d)
    wire.fail(failing, "the link broke", quiet=quiet)
    return name, failing


def let_go(wire: Wire, load: Load) -> None:
    """The blocks of a failed load get quiet; vLLM has gone on with others long since."""
    wire.scribble(load)
    wire.quiet(load)


def both(p: PlayedEngine, job: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a router that sends to both at once gives to P and to D."""
    here = p.address
    return (
        {"do_remote_decode": True, "transfer_id": job},
        {"do_remote_prefill": True, "transfer_id": job, "remote_host": here.host, "remote_port": here.port},
    )


def parties(p: PlayedEngine, job: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same in the schema of vLLM's peer-to-peer tier, in which llm-d speaks to both at once."""
    here = p.address
    return (
        {"remote_decoder": {"kv_request_id": job}},
        {"remote_prefiller": {"kv_request_id": job, "remote_host": here.host, "remote_port": here.port}},
    )


def check(engine: PlayedEngine, name: str, text: list[int], n: int = 4) -> None:
    assert engine.done[name].tokens == answer(text, n), f"{name}: wrong tokens"


def decode(d: PlayedEngine, text: list[int], params: dict[str, Any], *others: PlayedEngine, n: int = 4) -> str:
    """Have D answer; the id of its request, whose tokens were right."""
    name = d.add(text, params, n=n)
    d.run(*others, until=name)
    assert d.done[name].tokens == answer(text, n)
    return name


def offers_nothing(p: PlayedEngine, *others: PlayedEngine) -> None:
    """P has its blocks back soon, though no lease has ended."""
    end = time.monotonic() + 30
    while p.free < p.room:
        assert time.monotonic() < end, "P holds its blocks for a lease"
        for engine in (p, *others):
            engine.step()
        time.sleep(0.005)  # notices go over a socket


def crowd(engine: PlayedEngine, *, of: int = 30, seed: int = 50, others: int = 2, n: int = 60) -> list[str]:
    """Requests that want more and more blocks, so that those that came after them are preempted."""
    return [engine.add(prompt(of, seed=seed + i), n=n, name=f"crowd{i}") for i in range(others)]
