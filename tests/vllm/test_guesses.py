"""Engines that draft with an EAGLE or MTP module, beside recurrent states, rings and windows, on vLLM's own scheduler.

vLLM gives a request whose prompt is loaded room for drafts in its first step already, drops the last block of a prefix hit, and
leaves what wrong guesses wrote where it is: in slots, in rows of a ring, and in blocks for states of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.config import VllmConfig

from tests.vllm.cases import check, decode, load_that_fails, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import BLOCK, Group, answer, prompt
from tests.vllm.wire import Wire

GUESSES = 2
FULL, DRAFT, RING, WINDOW = Group(), Group(own=True), Group(ring=8), Group(window=24)
ALIGNED, ONE = Group(state=True, aligned=True), Group(state=True)
KINDS = {
    "full": (FULL, DRAFT),
    "states": (FULL, DRAFT, ALIGNED),
    "one state": (FULL, DRAFT, ONE),
    "ring": (FULL, DRAFT, RING),
    "window": (FULL, DRAFT, WINDOW),
    "all": (FULL, DRAFT, WINDOW, ALIGNED, RING),
}
kinds = pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
PAIRS = pytest.mark.parametrize(
    ("of", "to"), [(GUESSES, GUESSES), (0, GUESSES), (GUESSES, 0)], ids=["both draft", "D drafts", "P drafts"]
)


def engine(make: Make, kinds: tuple[Group, ...], guesses: int, **more: Any) -> Any:
    """One that makes so many guesses a step; without any it has no module that would, and no room for the states after them."""
    groups = [replace(g, drafts=guesses) if g.state else g for g in kinds if guesses or not g.own]
    return make(tuple(groups), guesses=guesses, **more)


@kinds
@PAIRS
@pytest.mark.parametrize("n", [*range(2, 10), 64, 65, 66, 90])
def test_a_prompt_of_any_length_and_a_decode_that_goes_on(
    make: Make, kinds: tuple[Group, ...], of: int, to: int, n: int
) -> None:
    """Rings are gone round several times."""
    p, d = engine(make, kinds, of), engine(make, kinds, to)
    text = prompt(n)
    name = decode(d, text, prefill(p, text), p, n=30)
    assert d.computed[name] == 1 + 29
    assert d.guessed >= 20 * to


def test_what_the_producer_s_last_mtp_modules_guessed_is_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompt's last tokens, all modules but the first keep KV of drafts, which nobody verifies."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 4)
    p, d = (engine(make, (FULL, DRAFT), 3) for _ in range(2))
    for n in (2, 3, 4, 90):
        text = prompt(n, seed=n)
        name = decode(d, text, prefill(p, text), p, n=6)
        assert d.computed[name] == min(n, 3) + 5


@kinds
@pytest.mark.parametrize("cached", [16, 48, 64, 80])
def test_behind_prefix_hits(make: Make, kinds: tuple[Group, ...], cached: int) -> None:
    """Of either side."""
    p, d = engine(make, kinds, GUESSES), engine(make, kinds, GUESSES)
    text = prompt(90)
    for side in (p, d):
        side.run(until=side.add([*text[: cached + 1], 3], n=2))
    for _ in range(2):
        name = decode(d, text, prefill(p, text), p, n=12)
        assert d.computed[name] <= 1 + 11


@kinds
def test_a_conversation_goes_on_from_what_was_loaded(make: Make, kinds: tuple[Group, ...]) -> None:
    p, d = engine(make, kinds, GUESSES), engine(make, kinds, GUESSES)
    text = prompt(70)
    for turn in range(3):
        name = decode(d, text, prefill(p, text), p, n=2 * BLOCK + turn)
        text += d.done[name].tokens + prompt(5, seed=turn)


@kinds
def test_a_load_that_fails(make: Make, wire: Wire, kinds: tuple[Group, ...]) -> None:
    p, d = engine(make, kinds, GUESSES), engine(make, kinds, GUESSES, policy="recompute")
    text = prompt(90)
    name, _ = load_that_fails(d, wire, text, prefill(p, text))
    d.run(p, until=name)
    assert d.done[name].tokens == answer(text, 12)
    wire.paused = False
    again = decode(d, prompt(50, seed=4), prefill(p, prompt(50, seed=4)), p)
    check(d, again, prompt(50, seed=4))
