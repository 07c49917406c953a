"""Prompts of all lengths, cut into chunks or not, of which either side may have a part in its prefix cache."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams

from tests.vllm.cases import CACHES, OFFER, decode, prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import FULL, HYBRID, answer, prompt
from tests.vllm.wire import Wire


@CACHES
def test_a_prompt_of_one_token(make: Make, groups: Any) -> None:
    """Its only token is computed at D: nothing is loaded, and P is told so. There is no state before it to offer."""
    p, d = make(groups), make(groups)
    text = prompt(1)
    if any(group.state for group in groups):
        name = p.add(text, OFFER, n=1)
        p.run(until=name)
        assert p.done[name].params is None
        return
    decode(d, text, prefill(p, text), p)


@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_request_that_repeats_itself_ends_as_well_as_any_other(make: Make, groups: Any) -> None:
    p, d = make(groups), make(groups)
    text = next(t for t in (prompt(50, seed) for seed in range(100)) if any(a == b for a, b in pairwise(answer(t, 60))))
    name = p.add(text, OFFER, n=60)
    twice = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    p.scheduler.requests[name].sampling_params.repetition_detection = twice
    p.run(until=name)
    params = p.done[name].params
    assert p.done[name].reason == "repetition" and params is not None
    assert d.computed[decode(d, text, params, p)] == 1 + 3


def test_a_hit_beyond_what_is_wanted(make: Make) -> None:
    """D has the whole prompt: nothing is loaded, and P gets its blocks back without having been read."""
    p, d = make(), make()
    text = prompt(81)
    d.add([*text, 5], n=2)
    d.run()
    params = prefill(p, text)
    d.wire.paused = True
    decode(d, text, params, p)
    assert not d.wire.loads(d)


def test_a_shared_prefix_is_not_written_to(make: Make, wire: Wire) -> None:
    """predecessor 2.2.6: D's cached blocks, which another request uses at the time, are not loaded over."""
    p, d = make(), make()
    common = prompt(64)
    user = d.add([*common, 5], n=40)
    d.steps(3)
    shared = set(d.tables[user][0][:4])
    params = prefill(p, [*common, 9, 9, 9])
    wire.paused = True
    d.add([*common, 9, 9, 9], params)
    d.steps(2)
    (load,) = wire.loads(d)
    assert not shared & {int(b) for b in load.fetch.blocks[0]}


def test_prompt_logprobs_read_no_cache(make: Make) -> None:
    """vLLM ignores our tokens for requests that must compute their whole prompt; P is told that nobody comes."""
    p, d = make(), make()
    text = prompt(60)
    params = prefill(p, text)
    name = d.add(text, params)
    d.scheduler.requests[name].skip_reading_prefix_cache = True
    d.run(p)
    assert d.done[name].tokens == answer(text, 4)
    assert d.computed[name] == 60 + 3
