"""Layers that one engine has for itself: groups that vLLM excludes from transfers, and draft models on one side only."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from tests.engine.direct import Switchboard
from tests.vllm.cases import check, decode, prefill
from tests.vllm.conftest import Make, both_ways
from tests.vllm.engine import Group, prompt
from tests.vllm.wire import Wire

overlap = both_ways

DRAFT, LOCAL = Group(own=True), Group(local=True)
FULL, WINDOW, STATE = Group(), Group(window=24), Group(state=True, aligned=True)


def test_vllm_is_told_which_blocks_it_has_to_zero(make: Make) -> None:
    d = make((LOCAL, FULL, STATE))
    assert d.scheduler.connector.get_loaded_kv_cache_group_ids(None) == (1, 2)


@pytest.mark.skipif(
    not hasattr(SlidingWindowSpec, "extra_retained_tokens"), reason="this vLLM keeps no more than the window"
)
@pytest.mark.parametrize("beside", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("at_p", [0, 2])
@pytest.mark.parametrize("n", [88, 89])
def test_what_is_kept_behind_a_window_for_drafts_is_not_taken_for_loaded(
    make: Make, wire: Wire, n: int, at_p: int, beside: bool
) -> None:
    """Whose window reaches further back than that of the prompt that was loaded finds nothing there."""
    p = make((FULL, Group(window=24, retained=at_p)))
    board = None if beside else Switchboard(waited=wire.pump)
    d = make((FULL, Group(window=24, retained=2)), board=board, extra={"step_budget": 1}, blocks=100)
    text = prompt(n)
    name = decode(d, text, prefill(p, text), p)
    assert d.computed[name] == 1 + 3
    for known in (81, 85, 87):
        other = [*text[:known], 3]
        again = d.add(other)
        d.run(until=again)
        check(d, again, other)


def test_what_the_producer_s_last_mtp_modules_guessed_is_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the prompt's last tokens, all modules but the first keep KV of drafts, which nobody verifies."""
    monkeypatch.setattr(VllmConfig, "num_prefill_lookahead_tokens", 4)
    p, d = (make((FULL, DRAFT), guesses=3, overlap=False) for _ in range(2))
    for n in (2, 3, 4, 90):
        text = prompt(n, seed=n)
        name = decode(d, text, prefill(p, text), p, n=6)
        assert d.computed[name] == min(n, 3) + 5
