"""Layers that one engine has for itself: groups that vLLM excludes from transfers, and draft models on one side only."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer_vllm.compat import REPORTS_BY_REQUEST
from tests.vllm.cases import decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import Group, prompt

overlap = both_ways
pytestmark = pytest.mark.skipif(not REPORTS_BY_REQUEST, reason="refused with vLLM 0.29, see test_settings.py")

DRAFT, LOCAL = Group(own=True), Group(local=True)
FULL, WINDOW, STATE = Group(), Group(window=24), Group(state=True, aligned=True)


@pytest.mark.parametrize(
    ("of", "to"),
    [
        ((FULL, DRAFT), (FULL,)),
        ((FULL,), (FULL, DRAFT)),
        ((DRAFT, FULL, WINDOW), (FULL, WINDOW)),
        ((FULL, WINDOW), (FULL, DRAFT, WINDOW)),
        ((FULL, STATE, DRAFT), (FULL, STATE)),
        ((FULL, STATE), (DRAFT, FULL, STATE)),
        ((LOCAL, FULL), (FULL, LOCAL)),
        ((FULL, STATE), (FULL, LOCAL, STATE)),
        ((LOCAL, WINDOW), (WINDOW,)),
    ],
    ids=lambda groups: "+".join(
        "draft" if g.own else "local" if g.local else "w" if g.window else "s" if g.state else "f" for g in groups
    ),
)
@pytest.mark.parametrize("n", [2, 40, 49])
def test_the_rest_is_moved(make: Make, of: Any, to: Any, n: int) -> None:
    """Tables stand at other places in the two engines, and have another number of rows."""
    p, d = make(of), make(to)
    text = prompt(n)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3


def test_vllm_is_told_which_blocks_it_has_to_zero(make: Make) -> None:
    d = make((LOCAL, FULL, STATE))
    assert d.scheduler.connector.get_loaded_kv_cache_group_ids(None) == (1, 2)
