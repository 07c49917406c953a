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
