"""By what loads of late the next is judged."""

from __future__ import annotations

from kvxfer.engine.paces import LinkPaces, Pace
from kvxfer.identity import Source

HERE, THERE = Source("a", 7000, 1), Source("b", 7000, 1)


def test_like_loads_decide_and_most_of_them() -> None:
    pace = Pace()
    assert pace.estimate(100) is None
    for seconds in (1.0, 1.0, 9.0):
        pace.took(100, seconds)
    assert pace.estimate(100) == pace.estimate(60) == 1.0, "one that was slow is an exception"
    pace.took(10_000, 3.0)
    assert pace.estimate(10_000) == 3.0, "what the short ones took, times a hundred, says nothing of a long one"
    assert pace.estimate(100_000) == 30.0
    for _ in range(16):
        pace.took(100, 2.0)
    assert pace.estimate(100) == 2.0, "what was long ago counts no more"


def test_what_has_got_better_is_believed_at_once() -> None:
    pace = Pace()
    for _ in range(5):
        pace.took(100, 9.0)
    pace.took(100, 1.0)
    assert pace.estimate(100) == 1.0
    pace.took(10_000, 50.0)
    assert pace.estimate(100) == 1.0, "a load of another size says nothing of it"


def test_an_estimate_that_refuses_is_put_to_the_test_now_and_then() -> None:
    pace = Pace()
    assert pace.fits(100, 5.0), "the first is given the chance"
    pace.took(100, 9.0)  # cold
    assert [pace.fits(100, 5.0) for _ in range(2)] == [False, True]
    pace.took(100, 1.0)
    assert all(pace.fits(100, 5.0) for _ in range(9))
    tried = 0
    for _ in range(400):
        if pace.fits(100, 0.5):
            tried += 1
            pace.took(100, 1.0)
    assert 20 <= tried <= 40, "what is slow for good is tried at most once in as many as are remembered"


def test_a_link_has_a_first_chance_and_after_a_failure_none_until_something_has_come() -> None:
    links = LinkPaces()
    assert links.estimate(HERE, 100) == 0.0
    links.delivered(HERE, 100, 1.0)
    assert links.estimate(HERE, 200) == 2.0 and links.estimate(THERE, 200) == 0.0
    links.failed(HERE)
    assert links.estimate(HERE, 100) is None
    links.delivered(HERE, 100, 4.0)
    assert links.estimate(HERE, 100) == 4.0, "what was before the failure is forgotten"


def test_of_links_without_number_the_oldest_are_forgotten() -> None:
    links = LinkPaces()
    links.failed(HERE)
    for port in range(1, 2001):
        links.failed(Source("c", port, 1))
    assert links.estimate(HERE, 1) == 0.0 and links.estimate(Source("c", 1999, 1), 1) is None
