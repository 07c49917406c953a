"""What is true of every kind of cache: one law for each thing that may happen to a prompt, and one table of kinds.

Each case is a kind; its lengths, chunks and ways are drawn from the kind's name, so that they are the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.vllm.cases import check, crowd, decode, let_go, load_that_fails, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ALIGNED, BLOCK, CHUNKED, DRAFTING, FULL, HYBRID, STATEFUL, Group, PlayedEngine, prompt
from tests.vllm.wire import Wire

pytestmark = pytest.mark.keep(12)
LENGTHS = [*range(2, 10), 15, 16, 17, 32, 33, 38, 39, 40, 41, 47, 48, 49, 64, 65, 66, 90, 100, 150]
"""Shorter than a block or a ring, aligned to blocks and not; windows whose edge falls on each side of a block's."""
HITS = [16, 48, 64, 80]
ONE, WINDOW, LATENT, RING = Group(), Group(window=24), Group(latent=1), Group(ring=8)
DRAFT, STATE, REPLAYED = Group(own=True), Group(state=True, aligned=True), Group(window=24, replayed=True)
LOCAL = Group(local=True)


@dataclass(frozen=True)
class Kind:
    """The groups of P and of D, which are P's unless it says otherwise, and how many tokens each guesses in a step."""

    groups: tuple[Group, ...]
    to: tuple[Group, ...] = ()
    guesses: tuple[int, int] = (0, 0)

    def engines(self, make: Make, *more: dict[str, Any]) -> Iterator[PlayedEngine]:
        """Make P and D. Without guesses, one has no module that would guess, and no room for the states after them."""
        for groups, guesses, said in zip((self.groups, self.to or self.groups), self.guesses, more, strict=True):
            if any(self.guesses):
                groups = tuple(replace(g, drafts=guesses) if g.state else g for g in groups if guesses or not g.own)
            yield make(groups, guesses=guesses, **said)

    def has(self, what: Callable[[Group], Any]) -> bool:
        return any(what(group) for group in (*self.groups, *self.to))


MODELS = {
    "DeepSeek V3 and R1, Kimi K2, Mistral Large 3, GLM 4.7 Flash": Kind((LATENT,)),
    "DeepSeek V3.2, GLM 5, Hunyuan 4": Kind((LATENT, LATENT)),
    "DeepSeek V4": Kind((Group(latent=4), Group(latent=16), Group(window=24, latent=1), Group(window=8, latent=1))),
    "DeepSeek V4.1": Kind((ONE, REPLAYED, RING)),
    "Gemma 4": Kind(HYBRID),
    "GLM 5 Next": Kind((ONE, RING)),
    "Inkling": Kind((ONE, WINDOW, Group(window=4))),
    "Llama 4": Kind(CHUNKED),
    "MiniMax M3": Kind((ONE, LATENT)),
    "Nemotron NAS": Kind(FULL),
    "Qwen 4 (experimental)": Kind((ONE, STATE, RING)),
    "Step 3.5": Kind(HYBRID),
}
KINDS = {
    **MODELS,
    "window": Kind((WINDOW,)),
    "replayed": Kind((ONE, REPLAYED)),
    "one state": Kind(STATEFUL),
    "states": Kind(ALIGNED),
    "room for drafts": Kind(DRAFTING),
    "one state to states": Kind(STATEFUL, ALIGNED),
    "states to one state": Kind(ALIGNED, STATEFUL),
    "room for drafts at P": Kind(DRAFTING, ALIGNED),
    "room for drafts at D": Kind(ALIGNED, DRAFTING),
    "a draft model at P": Kind((ONE, DRAFT), FULL),
    "a draft model at D": Kind(FULL, (ONE, DRAFT)),
    "a draft model in front, at P": Kind((DRAFT, ONE, WINDOW), (ONE, WINDOW)),
    "a draft model between, at D": Kind((ONE, WINDOW), (ONE, DRAFT, WINDOW)),
    "a draft model behind states, at P": Kind((ONE, STATE, DRAFT), (ONE, STATE)),
    "a draft model in front of states, at D": Kind((ONE, STATE), (DRAFT, ONE, STATE)),
    "local layers at other places": Kind((LOCAL, ONE), (ONE, LOCAL)),
    "local layers at D": Kind((ONE, STATE), (ONE, LOCAL, STATE)),
    "local layers at P": Kind((LOCAL, WINDOW), (WINDOW,)),
    **{
        f"{name}, {who}": Kind((ONE, DRAFT, *groups), guesses=guesses)
        for name, groups in {
            "full": (),
            "states": (STATE,),
            "one state": (Group(state=True),),
            "ring": (RING,),
            "window": (WINDOW,),
            "all": (WINDOW, STATE, RING),
        }.items()
        for who, guesses in {"both draft": (2, 2), "D drafts": (0, 2), "P drafts": (2, 0)}.items()
    },
}
"""vLLM gives a request that is loaded room for drafts in its first step already, drops the last block of a prefix hit where it
drafts, and leaves what wrong guesses wrote where it is: in slots, in rows of a ring, and in blocks for states of their own."""
KIND = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


@pytest.fixture
def overlap(request: pytest.FixtureRequest, rng: random.Random) -> bool:
    """Engines that guess see a step's result before they plan the next."""
    return not any(request.getfixturevalue("kind").guesses) and rng.random() < 0.5


def test_each_of_these_models_names_this_file(models_table: Any) -> None:
    named = {family.name for family in models_table.FAMILIES if family.by == "tests/vllm/test_kinds.py"}
    assert named == set(MODELS)


@KIND
def test_a_prompt_of_any_length_and_a_decode_that_goes_on(make: Make, kind: Kind, rng: random.Random) -> None:
    """In chunks or not; P may go on, so far that its windows have left the prompt behind, and D goes round its rings."""
    p, d = kind.engines(make, {"budget": rng.choice([16, 64])}, {"budget": rng.choice([16, 64])})
    for seed, n in enumerate(rng.sample(LENGTHS, 4)):
        text = prompt(n, seed)
        name = decode(d, text, prefill(p, text, n=rng.choice([1, 60])), p, n=30)
        assert d.computed[name] == 1 + 29, n
    assert d.guessed >= 4 * 20 * kind.guesses[1]


@KIND
def test_behind_prefix_hits(make: Make, kind: Kind, rng: random.Random) -> None:
    """Of either side or both. A load that would bring less than a window is not made where vLLM replays as many tokens."""
    p, d = kind.engines(make, {}, {})
    for seed, sides in enumerate([(p,), (d,), (p, d)]):
        text, cached = prompt(90, seed), rng.choice(HITS)
        for side in sides:
            side.run(until=side.add([*text[: cached + 1], 3], n=2))
        name = decode(d, text, prefill(p, text), p, n=12)
        if kind.has(lambda group: group.replayed) and d in sides and cached > 89 - 24 + 1:
            assert 90 - cached + 11 <= d.computed[name] <= 90 - cached + 24 + BLOCK + 11
        elif any(kind.guesses):
            assert d.computed[name] <= 1 + 11
        else:
            assert d.computed[name] == 1 + 11
        decode(d, text, prefill(p, text), p, n=12)


@KIND
def test_a_conversation_goes_on_from_what_was_loaded(make: Make, kind: Kind) -> None:
    p, d = kind.engines(make, {}, {})
    text = prompt(70)
    for turn in range(3):
        name = decode(d, text, prefill(p, text), p, n=2 * BLOCK + turn)
        text += d.done[name].tokens + prompt(5, seed=turn)


@KIND
@pytest.mark.parametrize("quiet", [True, False], ids=["quiet", "moving"])
def test_a_load_that_fails_is_computed(make: Make, wire: Wire, kind: Kind, quiet: bool, rng: random.Random) -> None:
    both: dict[str, Any] = {
        "blocks": 200,
        "resumes_as_new": rng.random() < 0.5,
    }  # what still moves may keep a quarter of them
    p, d = kind.engines(make, both, {"policy": "recompute", **both})
    text = prompt(90)
    name, failing = load_that_fails(d, wire, text, prefill(p, text), quiet)
    d.run(p, until=name)
    check(d, name, text, 12)
    assert d.computed[name] == 90 + 11
    if not quiet:
        let_go(wire, failing)
    wire.paused = False
    text = prompt(50, seed=4)
    decode(d, text, prefill(p, text), p)


@KIND
def test_an_engine_short_of_blocks(make: Make, kind: Kind, rng: random.Random) -> None:
    """It preempts requests whose KV was loaded, and computes them again when they are resumed."""
    blocks = 16 * len(kind.to or kind.groups)
    p, d = kind.engines(make, {}, {"blocks": blocks, "resumes_as_new": rng.random() < 0.5})
    text = prompt(90)
    params = prefill(p, text)
    others = crowd(d)
    name = d.add(text, params, n=30)
    d.run(p)
    assert kind.groups != FULL or name in d.preempted
    check(d, name, text, 30)
    for i, other in enumerate(others):
        check(d, other, prompt(30, seed=50 + i), 60)
