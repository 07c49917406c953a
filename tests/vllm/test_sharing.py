"""Several requests for one prompt, several prompts in one request, and engines with both roles."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.engine import standstill
from tests.vllm.cases import CACHES, OFFER, check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import FULL, HYBRID, answer, prompt
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


def test_several_answers_of_a_prefill(make: Make) -> None:
    """n > 1 at P: one of the children makes the offer, and each of them tells it, since vLLM relays the params of one only."""
    p, d = make(), make()
    text = prompt(90)
    names = p.samples(text, OFFER, 3, n=1, name="cmpl-abc-0")
    p.run(until=names[-1])
    offers = [params for name in names if (params := p.done[name].params) is not None]
    assert len(offers) == 3 and len({params["kvxfer_transfer"] for params in offers}) == 1
    decode(d, text, offers[0], p)


def test_a_batch_of_prompts(make: Make) -> None:
    """A batched completion's response carries the params of its first prompt only; the others' differ by index."""
    p, d = make(), make()
    texts = [prompt(50 + i, seed=i) for i in range(3)]
    at_p = [p.add(text, OFFER, n=1, name=f"cmpl-abc-{i}") for i, text in enumerate(texts)]
    p.run(until=at_p[-1])
    params = p.done[at_p[0]].params
    assert params is not None
    at_d = [d.add(text, params, name=f"cmpl-abc-{i}") for i, text in enumerate(texts)]
    d.run(p)
    for name, text in zip(at_d, texts, strict=True):
        check(d, name, text)
        assert d.computed[name] == 1 + 3


def test_both_roles_at_once(make: Make) -> None:
    """Two engines that prefill for each other, and one request that is loaded and offered on."""
    a, b = make(HYBRID, blocks=120), make(HYBRID, blocks=120)
    there, back = prompt(90), prompt(70, seed=4)
    one, two = a.add(there, OFFER, n=1), b.add(back, OFFER, n=1)
    a.run(b, until=one)
    b.run(a, until=two)
    first, second = b.add(there, a.done[one].params), a.add(back, b.done[two].params)
    a.run(b, until=second)
    b.run(a, until=first)
    check(b, first, there)
    check(a, second, back)
    assert b.computed[first] == a.computed[second] == 4
    turn = there + answer(there, 4) + prompt(20, seed=6)
    params = prefill(a, turn)
    on = b.add(turn, params | {"do_remote_decode": True}, n=1)
    b.run(a, until=on)
    after = b.done[on].params
    assert after is not None and after["remote_port"] != params["remote_port"]
    decode(a, turn, after, b)


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
