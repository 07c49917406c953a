"""Which steps tell how fast an engine computes prompts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer.testing.clock import PlayedClock
from kvxfer_vllm.steps import PromptPace


@pytest.fixture
def clock() -> Iterator[PlayedClock]:
    made = PlayedClock()
    with made.installed():
        yield made


def test_steps_that_are_at_least_half_full_of_prompts(clock: PlayedClock) -> None:
    told: list[tuple[int, float]] = []
    pace = PromptPace(lambda tokens, seconds: told.append((tokens, seconds)), 4096, 1)
    for tokens, requests in ((2100, 8), (2000, 1), (100, 100), (4096, 1)):
        pace.begins(tokens, requests)
        clock.now += 0.5
        pace.ended()
        clock.now += 7.0  # idle
    assert told == [(2100, 0.5), (4096, 0.5)]


def test_steps_that_begin_before_the_one_before_has_ended(clock: PlayedClock) -> None:
    told: list[tuple[int, float]] = []
    pace = PromptPace(lambda tokens, seconds: told.append((tokens, seconds)), 2048, 2)
    pace.begins(2000, 1)
    for tokens in (1500, 8, 1800):
        pace.begins(tokens, 1)
        clock.now += 0.25
        pace.ended()
    assert told == [(2000, 0.25), (1500, 0.25)]


def test_a_step_whose_end_was_not_told(clock: PlayedClock) -> None:
    told: list[tuple[int, float]] = []
    pace = PromptPace(lambda tokens, seconds: told.append((tokens, seconds)), 2048, 1)
    pace.begins(2000, 1)
    clock.now += 60.0
    pace.begins(1500, 1)
    clock.now += 0.25
    pace.ended()
    pace.ended()
    assert told == [(1500, 0.25)]


def test_shorter_steps_count_until_there_was_a_full_one(clock: PlayedClock) -> None:
    """An engine of conversations computes a few hundred new tokens at a time."""
    told: list[tuple[int, float]] = []
    pace = PromptPace(lambda tokens, seconds: told.append((tokens, seconds)), 8192, 1)
    for tokens, requests in ((300, 1), (200, 1), (2000, 30), (5000, 1), (300, 1), (2000, 1)):
        pace.begins(tokens, requests)
        clock.now += 0.5
        pace.ended()
    assert told == [(300, 0.5), (2000, 0.5), (5000, 0.5)]
