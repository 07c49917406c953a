"""What a small transfer may cost, counted in calls of Python: the same on every host, however busy that is."""

from __future__ import annotations

from kvxfer.bench import steps

MOST = {
    "offer": 10,
    "fetch": 20,
    "messages": 12,
    "want": 71,
    "have": 44,
    "runs": 15,
    "moved": 46,
    "committed": 44,
    "timers": 16,
}
"""A tenth above what it was when this was written. Whoever needs more says here what for.

Since then: one call of ``fetch``, five of ``want`` and three of ``moved`` for bands of layers, which need the pace of links.
"""


def test_no_step_of_a_small_transfer_costs_more_calls_than_it_has_to() -> None:
    calls = steps.calls(50)
    assert calls.keys() == MOST.keys()
    assert {step: n for step, n in calls.items() if n > MOST[step]} == {}
