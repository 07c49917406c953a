"""Who reads what from whom, for any TP and PP of both sides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from kvxfer.geometry import Cache, Group, Heads, Planner, Rank, Region, View, route
from kvxfer.geometry.assignment import head_range
from tests.geometry.engines import Case, cases
from tests.geometry.layouts import MOST, dealt

LAYERS = tuple(f"l{i}" for i in range(8))


def ranks(tp: int, stages: tuple[int, ...] = (8,), heads: int | None = 8) -> list[Cache]:
    """An engine: ``stages`` says how many layers each pipeline stage has; ``heads`` None is MLA."""
    out, first = [], 0
    for pp, count in enumerate(stages):
        layers, first = LAYERS[first : first + count], first + count
        for r in range(tp):
            if heads is None:
                held = None
            else:
                each = max(1, heads // tp)
                held = Heads(r * each if tp <= heads else r * heads // tp, each, heads, 64)
            views = tuple(
                View(p, 0, layers, tuple(4096 * i + 16 * k for i in range(count)), 2, 2048, 16, "x", held, 1024)
                for k, p in enumerate(("k", "v") if held else ("latent",))
            )
            out.append(Cache((Region(0, 8 * 4096),), (Group(2),), views, Rank(pp, r)))
    return out


def sources(producer: list[Cache], consumer: list[Cache]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    return {(c.pp, c.tp): [(p.pp, p.tp) for p in sorted(r.assignments)] for c, r in route(producer, consumer).items()}


@pytest.mark.parametrize(
    ("producer", "consumer", "want"),
    [
        (ranks(1), ranks(2), {(0, 0): [(0, 0)], (0, 1): [(0, 0)]}),
        (ranks(2), ranks(1), {(0, 0): [(0, 0), (0, 1)]}),
        (ranks(2), ranks(2), {(0, 0): [(0, 0)], (0, 1): [(0, 1)]}),
        (ranks(1, (5, 3)), ranks(1), {(0, 0): [(0, 0), (1, 0)]}),
        (ranks(1), ranks(1, (5, 3)), {(0, 0): [(0, 0)], (1, 0): [(0, 0)]}),
        (ranks(1, (5, 3)), ranks(1, (3, 5)), {(0, 0): [(0, 0)], (1, 0): [(0, 0), (1, 0)]}),
        # Two KV heads on four ranks: one replica is read by each, and readers spread.
        (ranks(4, heads=2), ranks(2, heads=2), {(0, 0): [(0, 0), (0, 1)], (0, 1): [(0, 2), (0, 3)]}),
        (ranks(2, heads=2), ranks(4, heads=2), {(0, i): [(0, i // 2)] for i in range(4)}),
        (ranks(2, heads=None), ranks(4, heads=None), {(0, i): [(0, i % 2)] for i in range(4)}),
        (ranks(4, heads=None), ranks(4, heads=None), {(0, i): [(0, i)] for i in range(4)}),
    ],
)
def test_links(producer: list[Cache], consumer: list[Cache], want: dict) -> None:  # type: ignore[type-arg]
    assert sources(producer, consumer) == want
    assert sources(producer[::-1], consumer[::-1]) == want, "the order of the arguments must not matter"


def test_a_producer_that_nobody_needs_has_one_reader_with_nothing_to_read() -> None:
    routes = route(ranks(4, heads=None), ranks(2, heads=None))
    assert [sorted(r.assignments) for r in routes.values()] == [[Rank(0, 0), Rank(0, 2)], [Rank(0, 1), Rank(0, 3)]]
    assert all(routes[Rank(0, i)].assignments[Rank(0, i + 2)] == () for i in (0, 1))
    assert all(n == 1 for r in routes.values() for n in r.readers.values())


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_cell_of_every_consumer_is_claimed_once(case: Case) -> None:
    producers = {s.cache.rank: s.cache for s in case.producer.stores.values()}
    consumers = {s.cache.rank: s.cache for s in case.consumer.stores.values()}
    routes = route(list(producers.values()), list(consumers.values()))
    assert routes.keys() == consumers.keys()
    readers = Counter(p for r in routes.values() for p in r.assignments)
    assert readers.keys() == producers.keys(), "a producer without a reader would never free its blocks"
    for rank, r in routes.items():
        assert r.readers == {p: readers[p] for p in r.assignments}
        cells: Counter[tuple[int, str, int, int]] = Counter()
        for p, assignments in r.assignments.items():
            for c in assignments:
                source = producers[p].views[c.src_view]
                assert set(c.layers) <= set(source.layers)
                lo, hi = head_range(source)
                assert lo <= c.head_lo < c.head_hi <= hi
                both = held(source) & held(consumers[rank].views[c.dst_view])
                assert both, "ranks that have no token in common do not meet"
                cells.update((c.dst_view, x, h, t) for x in c.layers for h in range(c.head_lo, c.head_hi) for t in both)
        assert cells == {
            (i, x, h, t): 1
            for i, v in enumerate(consumers[rank].views)
            for x in v.layers
            for h in range(*head_range(v))
            for t in held(v)
        }


def held(view: View) -> set[int]:
    """The tokens that a rank has of the first hundreds."""
    turns = view.turns
    return set(dealt(turns.index, turns.count, turns.span) if turns else range(MOST)) & set(range(200))


def with_draft(engine: list[Cache], **other: Any) -> list[Cache]:
    """The same engine, whose draft model has a layer of its own, in a group of its own in front of the others."""
    out = []
    for cache in engine:
        views = tuple(msgspec.structs.replace(v, group=1) for v in cache.views)
        draft = View("k", 0, ("draft",), (1024,), 2, 2048, 16, "x", views[0].heads, 1024, optional=True)
        draft = msgspec.structs.replace(draft, **other)
        out.append(Cache(cache.regions, (Group(2), *cache.groups), (draft, *views), cache.rank))
    return out


def drafts_moved(producer: list[Cache], consumer: list[Cache]) -> set[str]:
    """The layers that are assigned besides those that a model must have, which all are."""
    by_rank, layers = {c.rank: c for c in producer}, set()
    routes = route(producer, consumer)
    for sink in consumer:
        for rank, assignments in routes[sink.rank].assignments.items():
            Planner(by_rank[rank], sink, assignments)
            layers |= {layer for c in assignments for layer in c.layers}
    assert layers >= set(LAYERS)
    return layers - set(LAYERS)


@pytest.mark.parametrize("of", [1, 2])
@pytest.mark.parametrize("to", [1, 2])
def test_a_draft_model_is_moved_if_both_have_it(of: int, to: int) -> None:
    assert drafts_moved(with_draft(ranks(of)), with_draft(ranks(to))) == {"draft"}
    assert drafts_moved(ranks(of), with_draft(ranks(to))) == set()
    assert drafts_moved(with_draft(ranks(of)), ranks(to)) == set()
    assert drafts_moved(with_draft(ranks(of), encoding="another"), with_draft(ranks(to))) == set()
    assert drafts_moved(with_draft(ranks(of), unit=8), with_draft(ranks(to))) == set()
