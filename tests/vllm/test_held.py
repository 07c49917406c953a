"""What an engine is found to hold while its requests go on: another engine gets the bytes of the tokens that it asked for, or fewer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

from tests.control.conftest import until
from tests.vllm.cases import OFFER, check, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ALIGNED, BLOCK, Group, PlayedEngine, answer, ours, prompt
from tests.vllm.test_conversations import ask, named, rest
from tests.vllm.wire import Wire

FINDS_BESIDE_DRAFTS = hasattr(kv_cache_coordinator, "eagle_proof_margin")
"""Whether vLLM, if it drafts, finds a whole prefix in several groups; 0.31 drops a block in each round of its lookup."""


def source(p: PlayedEngine) -> dict[str, list[str]]:
    """What makes a request ask an engine and offer nothing."""
    return {"kvxfer_sources": named(p)["kvxfer_sources"]}


def test_a_prompt_without_its_last_token_is_not_taken_for_the_whole_one(make: Make) -> None:
    """Who offers a state computes no last token, and samples another one in its place; the whole prompt may be cached, too."""
    p, d = (make(ALIGNED, blocks=120) for _ in range(2))
    text = prompt(4 * BLOCK)
    p.run(until=p.add([*text, 5], n=2))
    offering = ask(p, text, OFFER)
    rest(p)
    other = [*text[:-1], *p.done[offering].tokens, *prompt(20, seed=9)]
    assert other[len(text) - 1] != text[-1]
    ask(d, other, source(p), p, n=4)
    rest(p, d)


def test_a_prompt_that_others_have_as_well_keeps_its_last_token_there(make: Make) -> None:
    """Where front end and engine share a process, all samples have one list of tokens: the client's."""
    p = make(ALIGNED)
    text = prompt(40)
    given = list(text)
    for name in ("0_both-12345678", "1_both-12345678"):
        params = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": OFFER})
        p.scheduler.add_request(Request(name, given, params, None, block_hasher=p.hasher, arrival_time=1.0))
    p.run(until=name)
    assert given == text and all(done.params for done in p.done.values())
    rest(p)


@pytest.mark.parametrize("n", [48, 49, 50])
@pytest.mark.parametrize("before", range(4))
def test_a_state_that_its_request_computes_on(make: Make, wire: Wire, n: int, before: int) -> None:
    """vLLM caches the state at the end of a prompt within a block, and copies it away only when it overwrites it."""
    p, d = (make(ALIGNED, size=2 * BLOCK, hashed=BLOCK, blocks=120) for _ in range(2))
    text = prompt(n)
    running = p.add(text, n=30)
    p.steps(before)
    wire.paused = True
    longer = [*text[:48], *prompt(20, seed=4)]
    name = d.add(longer, source(p))
    d.step()
    until(lambda: bool(ours(p.scheduler.connector)._sched.side.directory.inquiries))
    p.step()
    until(lambda: bool(d.step() and (wire.loads(d) or d.computed.get(name))))
    p.steps(3)
    wire.paused = False
    d.run(p, until=name)
    check(d, name, longer)
    p.run(d)
    check(p, running, text, 30)
    rest(p, d)


KINDS = {
    "full": (Group(), Group(own=True)),
    "one group": (Group(),),
    "window": (Group(), Group(own=True), Group(window=24)),
    "states": (Group(), Group(own=True), Group(state=True, aligned=True)),
}


@pytest.mark.parametrize("kinds", KINDS.values() if FINDS_BESIDE_DRAFTS else [KINDS["one group"]])
def test_engines_that_draft_are_asked_for_prefixes(make: Make, kinds: tuple[Group, ...]) -> None:
    """vLLM's own lookup drops the last block of a hit, for the sake of drafts."""
    groups = tuple(replace(group, drafts=2) if group.state else group for group in kinds)
    p, d = (make(groups, guesses=2, blocks=200) for _ in range(2))
    text = prompt(100)
    ask(p, text, {}, n=40)
    longer = [*text, *answer(text, 40), *prompt(9, seed=3)]
    name = ask(d, longer, source(p), p, n=4)
    if not any(group.state for group in groups):
        assert d.computed[name] <= len(longer) - 128 + BLOCK + 3
    assert d.loaded
    rest(p, d)


def wrong_behind(d: PlayedEngine, text: list[int]) -> list[int]:
    """After how many of a prompt's tokens another one may go on and get wrong tokens, because of what an engine has cached."""
    found = []
    for common in range(BLOCK + 1, len(text)):
        other = [*text[:common], *prompt(5, seed=9)]
        name = d.add(other, n=2)
        d.run(until=name)
        if d.done[name].tokens != answer(other, 2):
            found.append(common)
    return found


def bring(p: PlayedEngine, d: PlayedEngine, text: list[int], asked: bool) -> None:
    """Have an engine load a prompt and answer it."""
    if asked:
        p.run(until=p.add(text, n=2))
    name = d.add(text, source(p) if asked else prefill(p, text))
    d.run(p, until=name)
    check(d, name, text)
    assert d.loaded


@pytest.mark.skipif(
    not hasattr(SlidingWindowSpec, "extra_retained_tokens"), reason="this vLLM keeps no more than the window"
)
@pytest.mark.parametrize("asked", [False, True], ids=["told", "asked"])
@pytest.mark.parametrize("n", [70, 81, 97])
@pytest.mark.parametrize("retained", [16, 40])
def test_what_a_load_has_left_out_is_not_found_once_it_is_answered(
    make: Make, n: int, retained: int, asked: bool
) -> None:
    """An engine keeps the ends of answers findable, but not the blocks behind a window that no producer has."""
    groups = (Group(), Group(window=16, retained=retained))
    p, d = (make(groups, blocks=120) for _ in range(2))
    text = prompt(n)
    bring(p, d, text, asked)
    assert not wrong_behind(d, text)
    rest(p, d)


@pytest.mark.parametrize("asked", [False, True], ids=["told", "asked"])
@pytest.mark.parametrize(("n", "window"), [(97, 48), (104, 24), (113, 24), (113, 33), (127, 33), (127, 24), (120, 16)])
def test_a_window_from_an_engine_with_smaller_blocks(make: Make, n: int, window: int, asked: bool) -> None:
    """It has given up what lies behind the window, which the other one's first block has room for."""
    groups = (Group(), Group(window=window))
    p, d = make(groups, blocks=120), make(groups, blocks=120, size=2 * BLOCK)
    text = prompt(n)
    bring(p, d, text, asked)
    assert not wrong_behind(d, text)
    rest(p, d)
