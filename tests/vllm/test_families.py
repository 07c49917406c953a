"""Models whose groups no other test has, on vLLM's own scheduler: latents in rows of one or more tokens, and windows of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.cases import RUNNERS, check, crowd, decode, let_go, load_that_fails, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import Group, answer, prompt
from tests.vllm.wire import Wire

overlap = both_ways

FULL, WINDOW, LATENT = Group(), Group(window=24), Group(latent=1)
GROUPS = {
    "DeepSeek V3 and R1, Kimi K2, Mistral Large 3, GLM 4.7 Flash": (LATENT,),
    "DeepSeek V3.2, GLM 5, Hunyuan 4": (LATENT, Group(latent=1)),
    "DeepSeek V4": (Group(latent=4), Group(latent=16), Group(window=24, latent=1), Group(window=8, latent=1)),
    "MiniMax M3": (FULL, LATENT),
    "Inkling": (FULL, WINDOW, Group(window=4)),
    "Gemma 4": (FULL, WINDOW),
    "Step 3.5": (FULL, WINDOW),
    "Nemotron NAS": (FULL,),
}
MODELS = pytest.mark.parametrize("kinds", list(GROUPS.values()), ids=list(GROUPS))


def test_each_of_these_models_names_this_file(models_table: Any) -> None:
    assert {family.name for family in models_table.FAMILIES if family.by == "tests/vllm/test_families.py"} == set(
        GROUPS
    )


@pytest.mark.parametrize("n", [2, 15, 16, 17, 90, 150])
@MODELS
def test_a_prompt_of_any_length(make: Make, kinds: tuple[Group, ...], n: int) -> None:
    """The longer ones are computed in chunks."""
    p, d = make(kinds), make(kinds)
    name = decode(d, prompt(n), prefill(p, prompt(n)), p, n=30)
    assert d.computed[name] == 1 + 29


@pytest.mark.parametrize("cached", [16, 64, 80])
@MODELS
def test_behind_a_prefix_hit(make: Make, kinds: tuple[Group, ...], cached: int) -> None:
    p, d = make(kinds), make(kinds)
    text = prompt(90)
    d.run(until=d.add(text[: cached + 1] + prompt(3, seed=9), n=1))
    name = decode(d, text, prefill(p, text), p, n=12)
    assert d.computed[name] == 1 + 11


@RUNNERS
@MODELS
def test_a_load_that_fails_is_computed(make: Make, wire: Wire, kinds: tuple[Group, ...], resumes_as_new: bool) -> None:
    p, d = make(kinds, resumes_as_new=resumes_as_new), make(kinds, policy="recompute", resumes_as_new=resumes_as_new)
    text = prompt(90)
    name, failing = load_that_fails(d, wire, text, prefill(p, text), quiet=False)
    d.run(p, until=name)
    let_go(wire, failing)
    assert d.done[name].tokens == answer(text, 12)


@MODELS
def test_an_engine_short_of_blocks(make: Make, kinds: tuple[Group, ...]) -> None:
    """It preempts requests whose KV was loaded, and computes them again."""
    p, d = make(kinds), make(kinds, blocks=16 * len(kinds))
    text = prompt(90)
    params = prefill(p, text)
    others = crowd(d)
    name = d.add(text, params, n=30)
    d.run(p)
    check(d, name, text, 30)
    for i, other in enumerate(others):
        check(d, other, prompt(30, seed=50 + i), 60)
