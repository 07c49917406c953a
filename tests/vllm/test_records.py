"""A request of vLLM's that has the name of an earlier one, whose blocks are held for others: each has a record of its own."""

from __future__ import annotations

import copy

import pytest

from tests.vllm.cases import prefill
from tests.vllm.conftest import Make
from tests.vllm.engine import ours, prompt


@pytest.mark.parametrize("first", ["the earlier one is released", "the later one ends"])
def test_one_of_two_requests_of_a_name_ends(make: Make, first: str) -> None:
    p = make()
    prefill(p, prompt(50))
    p.lease_ends()  # seen with the next step
    hooks = ours(p.scheduler.connector)._sched
    (held,) = hooks._requests._last.values()
    assert held.over and len(hooks.frees._held) == 1
    later = copy.copy(held.request)
    later.kv_transfer_params = None
    facts = hooks.arrive(later)
    assert facts is not held and hooks.arrive(later) is facts and facts.earlier is held
    if first == "the earlier one is released":
        p.steps(3)
        assert facts.earlier is None and not hooks.frees._held
        hooks.finish(later, [[]])
        assert not hooks._requests
    else:
        hooks.finish(later, [[]])
        assert hooks._requests.last(held.name) is held and held.over
        p.steps(3)
        assert not hooks._requests and not hooks.frees._held
