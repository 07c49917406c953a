"""What a small transfer may cost, counted in calls of Python: the same on every host, however busy that is."""

from __future__ import annotations

from kvxfer_bench.control import calls

MOST = {
    "offer": 11,
    "fetch": 20,
    "messages": 14,
    "want": 33,
    "have": 44,
    "runs": 15,
    "moved": 46,
    "committed": 45,
    "timers": 16,
}
"""A tenth above what it was when this was written. Whoever needs more says here what for.

Since then: one call of ``fetch`` and three of ``moved`` for bands of layers, which need the pace of links. Two of ``messages`` look at
a short table's ids without numpy, which took longer. Forty less of ``want``, where a producer makes no plan if all rows go as they are;
four of ``committed`` count the bytes there. One of ``offer`` makes the name that two of ``committed`` made; there, nine less, since
last words are not looked for by their attempts alone. Three of ``committed`` ask for a reader's state, which was kept in four sets for
each offer: those cost the garbage collector more. One more of ``committed`` asks whether the last block may come to its end.
"""


def test_no_step_of_a_small_transfer_costs_more_calls_than_it_has_to() -> None:
    made = calls(50)
    assert made.keys() == MOST.keys()
    assert {step: n for step, n in made.items() if n > MOST[step]} == {}
