"""The benchmark of the handover: its steps are exact, whatever else the machine does."""

from __future__ import annotations

import pytest

from kvxfer_bench.verdict import compare, estimate
from kvxfer_bench.vllm.conversation import Timed, by_turn, faults, summary
from kvxfer_bench.vllm.conversations import PlayedTurn, Reply
from kvxfer_bench.vllm.exposed import exposure
from kvxfer_bench.vllm.handover import MODES, STAGES, measure, picture


@pytest.mark.parametrize("overlap", MODES.values(), ids=MODES)
def test_a_load_costs_no_step_within_one_and_one_beside(overlap: bool) -> None:
    within = measure(tokens=100, rounds=1, step_ms=300, budget_ms=1000, backend="zmq", overlap=overlap)
    beside = measure(tokens=100, rounds=1, step_ms=300, budget_ms=0, backend="zmq", overlap=overlap)
    assert within["further_steps"] == [0] and beside["further_steps"] == [1]
    for found in (within, beside):
        assert list(found["ladder_us"]) == list(STAGES) and list(found["spent_us"]) == list(STAGES[1:])
        assert sorted(found["ladder_us"].values()) == list(found["ladder_us"].values())
    drawn = picture({"in_step": {"stepwise": within}, "beside": {"stepwise": beside}})
    assert drawn.startswith("<svg") and all(stage in drawn for stage in STAGES)


def test_what_is_moved_while_the_prompt_is_computed_nobody_waits_for() -> None:
    """The times are of a throttled link: whatever else the machine does makes them longer, so the shortest count."""
    tries = (exposure(chunks=4, rounds=3, transfer_ms=200, backend="cma") for _ in range(3))
    goals = {"chunked_ms": "goal", "banded_ms": "banded_goal", "one_block_ms": "goal"}
    assert any(
        200 <= min(t["whole_ms"])
        and all(0 < min(t[found]) <= t[goal] * min(t["whole_ms"]) for found, goal in goals.items())
        for t in tries
    )


def test_turns_are_summed_up_by_way() -> None:
    def timed(n: int, computed: int, ms: float) -> Timed:
        return Timed(n, PlayedTurn(Reply([1], computed, None, ms / 1e3), Reply([1], 1, None, 0.5)), 2 * ms / 1e3, 0.0)

    talks = [[timed(100, 100, ms), timed(150, computed, ms)] for ms, computed in ((10.0, 20), (30.0, 40), (20.0, 30))]
    found = summary(talks)
    assert [(at["prompt_tokens"], at["prefill_computed"], at["prefill_ms"], at["first_token_ms"]) for at in found] == [
        (100, 100, 20.0, 40.0),
        (150, 30, 20.0, 40.0),
    ]
    lines = by_turn({"recompute": found, "load": found}).splitlines()
    assert len(lines) == 3 and lines[2].split() == ["2", "150", "30,", "40.0", "30,", "40.0"]


def test_turns_are_checked_for_their_tokens_and_for_what_prefill_computes() -> None:
    def turn(n: int, computed: int, said: list[int], plain: list[int]) -> Timed:
        return Timed(n, PlayedTurn(Reply([1], computed, None, 0.1), Reply(said, 1, None, 0.1)), 0.1, 0.1, plain)

    ten, other = [7] * 10, [*[7] * 9, 8]
    good = [turn(100, 100, ten, ten), turn(150, 40 + 32, ten, ten)]
    dear = [turn(100, 100, ten, ten), turn(150, 40 + 33, ten, ten)]
    wrong = [turn(100, 100, ten, ten), turn(150, 40, ten, other)]
    assert faults([good], loads=True) == []
    assert faults([good, dear], loads=True) == [
        "conversation 2, turn 2: prefill has computed 73 tokens, of which 40 are new"
    ]
    assert faults([dear], loads=False) == []
    assert faults([wrong], loads=True) == ["conversation 1, turn 2: the tokens are not those of the plain server"]


def test_a_verdict_has_the_interval_that_its_rounds_allow() -> None:
    """Of ten rounds at least two are on each side of the true median in 0.979 of all runs. Five are on one side in 0.063."""
    assert estimate([9.0, 1.0, 8.0, 2.0, 7.0, 3.0, 6.0, 4.0, 5.0, 100.0]) == (5.5, 2.0, 9.0)
    assert estimate([3.0, 1.0, 2.0, 4.0, 5.0, 6.0]) == (3.5, 1.0, 6.0)
    assert estimate([1.0] * 5) == (1.0, -float("inf"), float("inf"))
    drift = [10.0 * n for n in range(8)]  # of the machine, which both share
    slower = compare(drift, [at + 12 + n % 3 for n, at in enumerate(drift)])
    assert slower.words == "13.0 ms slower, interval 12.0 to 14.0"
    assert compare(drift, [at - 2.5 for at in drift]).words == "2.5 ms faster, interval -2.5 to -2.5"
    alike = compare(drift, [at + (-1) ** n * n for n, at in enumerate(drift)])
    assert alike.words == "no difference shown: 0.5 ms faster, interval -7.0 to 6.0"
