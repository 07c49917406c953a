"""The benchmark of the handover: its steps are exact, whatever else the machine does."""

from __future__ import annotations

from kvxfer_vllm.handover import STAGES, measure, picture


def test_a_load_costs_no_step_within_one_and_one_beside() -> None:
    within = measure(tokens=100, rounds=1, step_ms=300, budget_ms=1000, backend="zmq")
    beside = measure(tokens=100, rounds=1, step_ms=300, budget_ms=0, backend="zmq")
    assert within["further_steps"] == [0] and beside["further_steps"] == [1]
    for found in (within, beside):
        assert list(found["ladder_us"]) == list(STAGES)
        assert sorted(found["ladder_us"].values()) == list(found["ladder_us"].values())
    drawn = picture({"in_step": within, "beside": beside})
    assert drawn.startswith("<svg") and all(stage in drawn for stage in STAGES)
