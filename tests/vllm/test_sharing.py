"""Several requests for one prompt, several prompts in one request, and engines with both roles."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.engine import standstill
from tests.vllm.cases import CACHES, check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import FULL, prompt
from tests.vllm.wire import Wire

overlap = both_ways


@CACHES
def test_several_answers_to_one_prompt(make: Make, groups: Any) -> None:
    """n > 1 at D: one of the children loads, the others wait and find its blocks in the prefix cache."""
    p, d = make(groups), make(groups)
    text = prompt(90)
    params = prefill(p, text)
    names = [d.add(text, params, name=f"{i}_cmpl-abc-0") for i in range(4)]
    d.step()
    assert len(d.wire.loads(d)) <= 1
    d.run(p)
    for name in names:
        check(d, name, text)
    assert sum(d.computed[name] == 4 for name in names) == 1
    if groups == FULL:  # vLLM finds no hit in windows of which it has only what the next token needs
        assert all(d.computed[name] < 40 for name in names)


@pytest.mark.parametrize("victim", [0, 1])
def test_several_answers_and_one_is_aborted(make: Make, wire: Wire, victim: int) -> None:
    p, d = make(), make()
    text = prompt(90)
    params = prefill(p, text)
    wire.paused = True
    names = [d.add(text, params, name=f"{i}_cmpl-abc-0") for i in range(3)]
    d.steps(2)
    d.abort(names.pop(victim))
    wire.paused = False
    d.run(p)
    for name in names:
        check(d, name, text)


@CACHES
def test_what_is_offered_on_is_loaded_if_it_can_be(make: Make, groups: Any) -> None:
    """Who offers a state computes a token less, and so cannot use one of another engine: that is no failure of its request."""
    a, b = (make(groups, policy="fail") for _ in range(2))
    text = prompt(90)
    on = b.add(text, prefill(a, text) | {"do_remote_decode": True}, n=1)
    b.run(a, until=on)
    assert b.computed[on] == (89 if any(group.state for group in groups) else 1)
    after = b.done[on].params
    assert after is not None and after["remote_port"] == b.address.port
    decode(a, text, after, b)


def test_two_engines_that_are_full_of_what_they_hold_for_each_other(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither can admit what it would load from the other, nor anything else, until one lets go."""
    monkeypatch.setattr(standstill, "STANDSTILL_S", 0.05)
    a, b = make(blocks=14, caching=False), make(blocks=14, caching=False)
    there, back = [prompt(90, seed=i) for i in (1, 2)], [prompt(90, seed=i) for i in (3, 4)]
    from_a, from_b = [prefill(a, text) for text in there], [prefill(b, text) for text in back]
    assert a.free < 6 and b.free < 6, "the caches are not full"
    of_a = [a.add(text, params) for text, params in zip(back, from_b, strict=True)]
    of_b = [b.add(text, params) for text, params in zip(there, from_a, strict=True)]
    unrelated = a.add(prompt(100, seed=9))
    for engine, names in ((a, [*of_a, unrelated]), (b, of_b)):
        for name in names:
            a.run(b, until=name) if engine is a else b.run(a, until=name)
    for name, text in zip(of_a, back, strict=True):
        check(a, name, text)
    for name, text in zip(of_b, there, strict=True):
        check(b, name, text)
    check(a, unrelated, prompt(100, seed=9))
    a.lease_ends()
    b.lease_ends()
