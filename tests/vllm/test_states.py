"""Recurrent states beside a prefix cache: in which block they are looked for, on either side, and what is cached of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.cases import OFFER, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import ALIGNED, BLOCK, DRAFTING, STATEFUL, PlayedEngine, answer, prompt
from tests.vllm.wire import Load, Wire

overlap = both_ways
STATES = pytest.mark.parametrize("groups", [ALIGNED, DRAFTING], ids=["aligned", "drafting"])


def seen(wire: Wire, p: PlayedEngine, d: PlayedEngine, text: list[int]) -> Load:
    """P prefills, D answers; the load between them, whose tokens were right."""
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(2)
    (load,) = wire.loads(d)
    wire.paused = False
    d.run(p, until=name)
    assert d.done[name].tokens == answer(text, 4)
    assert d.computed[name] == 1 + 3
    return load


@STATES
@pytest.mark.parametrize("n", [66, 72, 80, 81])
def test_a_prefix_that_d_has_is_not_loaded_again(make: Make, wire: Wire, groups: Any, n: int) -> None:
    p, d = make(groups), make(groups)
    text = prompt(n)
    d.add([*text[:64], 3], n=2)
    d.run()
    assert seen(wire, p, d, text).fetch.start == 64


@STATES
@pytest.mark.parametrize("n", [66, 80, 81, 90])
def test_a_prefix_that_p_has_is_not_computed_again(make: Make, wire: Wire, groups: Any, n: int) -> None:
    p, d = make(groups), make(groups)
    text = prompt(n)
    p.add([*text[:64], 3], n=2)
    p.run()
    assert seen(wire, p, d, text).fetch.start == 0
    name = next(iter(set(p.done) - {r for r in p.done if p.computed[r] > 60}))
    assert p.computed[name] == n - 1 - 64


@STATES
def test_what_was_loaded_is_cached(make: Make, groups: Any) -> None:
    """D computes the next turn from the end of the last whole block of the first."""
    p, d = make(groups), make(groups)
    for n in (81, 65):  # the state that was loaded stands at the end of a block, and at its own first token
        text = prompt(n, seed=n)
        said = d.done[decode(d, text, prefill(p, text), p, n=40)].tokens
        turn = [*text, *said, *prompt(10, seed=7)]
        name = d.add(turn)
        d.run()
        assert d.done[name].tokens == answer(turn, 4)
        assert d.computed[name] == len(turn) - (n + 39) // BLOCK * BLOCK + 3


@STATES
@pytest.mark.parametrize("n", [2, 9, 15, 16, 17, 18, 23, 24, 25, 31, 32, 33, 40, 41, 48, 49, 57])
@pytest.mark.parametrize("side", ["p", "d", "neither"])
def test_hits_within_a_block(make: Make, groups: Any, n: int, side: str) -> None:
    """vLLM's prefix cache has hashes for less than a block: it copies a state away before it computes on in its block."""
    p, d = make(groups, hashed=8), make(groups, hashed=8)
    text = prompt(n + 8)
    if side != "neither":
        engine = p if side == "p" else d
        engine.add([*text[:n], 3], n=12)
        engine.run()
    decode(d, text, prefill(p, text), p)
    for engine in (p, d):  # what either has cached since, it can go on with
        turn = [*text[:n], *prompt(20, seed=5)]
        name = engine.add(turn, n=20)
        engine.run()
        assert engine.done[name].tokens == answer(turn, 20)


@STATES
def test_a_state_that_was_evicted_comes_with_the_rest(make: Make, wire: Wire, groups: Any) -> None:
    """D's attention still has 80 tokens of the prompt cached, its states none: only what attention lacks is loaded."""
    p, d = make(groups), make(groups)
    text = prompt(100)
    lose_states(d, text)
    assert seen(wire, p, d, text).fetch.start == 80


@STATES
@pytest.mark.parametrize("n", [81, 100])
def test_nor_is_a_state_assumed_where_nothing_is_loaded(make: Make, wire: Wire, groups: Any, n: int) -> None:
    """The same, but attention has all that could be loaded (81), or the load fails (100): D computes anew."""
    p, d = make(groups), make(groups)
    text = prompt(n)
    lose_states(d, text)
    params = prefill(p, text)
    wire.paused = True
    name = d.add(text, params)
    d.steps(3)
    for load in wire.loads(d):
        wire.fail(load, "the link broke")
    wire.paused = False
    d.run(p, until=name)
    assert d.done[name].tokens == answer(text, 4)
    assert d.computed[name] == n + 3


def lose_states(engine: PlayedEngine, text: list[int]) -> None:
    """Have an engine cache 80 tokens of a prompt, and forget all states."""
    engine.add([*text[:80], 3], n=2)
    engine.run()
    cached = {b.block_id for b in engine.pool.blocks if b.block_hash is not None}
    states = {b for b in cached if not engine.memory[b, 1:].any()}
    assert states and states < cached
    engine.pool.evict_blocks(states)


@pytest.mark.parametrize("groups", [STATEFUL, ALIGNED], ids=["stateful", "aligned"])
def test_a_prompt_that_may_grow_is_computed_whole(make: Make, groups: Any) -> None:
    """The next part of the input follows its last token, so that no state is offered that lacks it."""
    p = make(groups)
    name = p.add(prompt(40), OFFER, n=3, resumable=True)
    p.run(until=name)
    assert p.done[name].tokens == answer(prompt(40), 3)
    p.abort(name)
    p.run()
    p.lease_ends()


@pytest.mark.parametrize("groups", [STATEFUL, ALIGNED], ids=["stateful", "aligned"])
@pytest.mark.parametrize("transfer", [1.5, "x" * 5000, ["job"]], ids=["a fraction", "too long", "a list"])
def test_a_prompt_that_cannot_be_offered_is_computed_whole(make: Make, groups: Any, transfer: Any) -> None:
    p = make(groups)
    name, text = p.add(prompt(40), OFFER | {"transfer_id": transfer}, n=4), prompt(40)
    p.run(until=name)
    assert p.done[name].tokens == answer(text, 4) and p.done[name].params is None
