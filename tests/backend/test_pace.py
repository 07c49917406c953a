from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backend import look_again

SECONDS = st.floats(0, 1e6)


@given(SECONDS, st.floats(0, 100))
def test_the_next_look_delays_what_is_waited_for_by_little(since: float, waited: float) -> None:
    now = since + waited
    late = look_again(since, now) - now
    assert 0.00004 < late < max(0.00006, waited / 25)
    assert late < 0.0006, "even at the end of a long wait"


def test_a_long_wait_takes_two_thousand_looks_a_second() -> None:
    looks, now = 0, 0.0
    while now < 10:
        now = look_again(0.0, now)
        looks += 1
    assert 19_000 < looks < 21_000
