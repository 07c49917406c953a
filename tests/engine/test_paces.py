"""By what loads of late the next is judged."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.engine.paces import MIN_STEP, REMEMBERED, LinkPaces, LoadOrCompute, Pace
from kvxfer.identity import Source

HERE, THERE = Source("a", 7000, 1), Source("b", 7000, 1)


def test_like_loads_decide_and_most_of_them() -> None:
    pace = Pace()
    assert pace.estimate(100) is None
    for seconds in (1.0, 1.0, 9.0):
        pace.took(100, seconds)
    assert pace.estimate(100) == pace.estimate(60) == 1.0, "one that was slow is an exception"
    pace.took(10_000, 3.0)
    assert pace.estimate(10_000) == 3.0, "what the short ones took, times a hundred, says nothing of a long one"
    assert pace.estimate(100_000) == 30.0
    for _ in range(16):
        pace.took(100, 2.0)
    assert pace.estimate(100) == 2.0, "what was long ago counts no more"


def test_what_has_got_better_is_believed_at_once() -> None:
    pace = Pace()
    for _ in range(5):
        pace.took(100, 9.0)
    pace.took(100, 1.0)
    assert pace.estimate(100) == 1.0
    pace.took(10_000, 50.0)
    assert pace.estimate(100) == 1.0, "a load of another size says nothing of it"


def test_an_estimate_that_refuses_is_put_to_the_test_now_and_then() -> None:
    pace = Pace()
    assert pace.fits(100, 5.0), "the first is given the chance"
    pace.took(100, 9.0)  # cold
    assert [pace.fits(100, 5.0) for _ in range(2)] == [False, True]
    pace.took(100, 1.0)
    assert all(pace.fits(100, 5.0) for _ in range(9))
    tried = 0
    for _ in range(400):
        if pace.fits(100, 0.5):
            tried += 1
            pace.took(100, 1.0)
    assert 20 <= tried <= 40, "what is slow for good is tried at most once in as many as are remembered"


def test_a_link_has_a_first_chance_and_after_a_failure_none_until_something_has_come() -> None:
    links = LinkPaces()
    assert links.estimate(HERE, 100) == 0.0
    links.delivered(HERE, 100, 1.0)
    assert links.estimate(HERE, 200) == 2.0 and links.estimate(THERE, 200) == 0.0
    links.failed(HERE)
    assert links.estimate(HERE, 100) is None
    links.delivered(HERE, 100, 4.0)
    assert links.estimate(HERE, 100) == 4.0, "what was before the failure is forgotten"


# --- whether a load pays -----------------------------------------------------------------------------------------------

SIZES = st.integers(MIN_STEP, 1 << 20)
SECONDS = st.floats(1e-7, 10.0)


def told(steps: list[int], fixed: float, token: float) -> LoadOrCompute:
    """What is known after steps of these sizes, at an engine whose steps take a fixed time, and a time for each token."""
    choice = LoadOrCompute()
    for tokens in steps:
        choice.took(tokens, fixed + token * tokens)
    return choice


@given(st.lists(SIZES, min_size=1, max_size=40), SIZES, SECONDS, SECONDS)
def test_computing_costs_what_the_fullest_step_says(steps: list[int], tokens: int, fixed: float, token: float) -> None:
    """No less than the tokens themselves, and no more than their share of the fixed time of the fullest step: of a short prompt, too."""
    found = told(steps, fixed, token).computing(tokens, "auto")
    assert token * tokens * 0.999 <= found <= (token + fixed / (max(steps) / 2)) * tokens * 1.001


@given(st.lists(SIZES, min_size=1, max_size=40), SIZES, SECONDS, SECONDS, SECONDS)
def test_a_load_is_begun_only_if_one_like_it_ended_sooner(
    steps: list[int], tokens: int, fixed: float, token: float, load: float
) -> None:
    choice = told(steps, fixed, token)
    choice.loaded(HERE, tokens, load)
    computing = choice.computing(tokens, "auto")
    assert (choice.saves(HERE, tokens, "auto") > 0) is (load < computing)
    assert choice.saves(HERE, tokens, "always") == math.inf, "a setting overrides it"
    assert choice.saves(THERE, tokens, "auto") > 0, "of a source that has sent nothing yet, nothing is known"


@given(st.lists(SIZES, max_size=40), SIZES, SIZES, SECONDS, SECONDS)
def test_more_tokens_cost_more_and_a_faster_step_never_more(
    steps: list[int], few: int, many: int, fixed: float, token: float
) -> None:
    choice = told(steps, fixed, token)
    few, many = sorted((few, many))
    before = choice.computing(few, "auto")
    assert before <= choice.computing(many, "auto")
    choice.took(many, token * many)
    assert choice.computing(few, "auto") <= before


def test_a_short_prompt_is_not_taken_to_cost_a_whole_step() -> None:
    """A load has a fixed cost as well: here 5 ms, where 64 tokens are computed in one, in a step that is made in any case."""
    choice = LoadOrCompute()
    for _ in range(REMEMBERED):
        choice.took(4096, 0.07)
        choice.took(MIN_STEP, 0.01)
    choice.loaded(HERE, 64, 0.005)
    choice.loaded(THERE, 4096, 0.015)
    assert choice.saves(HERE, 64, "auto") < 0 < choice.saves(THERE, 4096, "auto")
