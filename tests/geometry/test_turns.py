"""Ranks that take turns with the tokens of a request (context parallelism), beside tokens that are dealt out like cards."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, Group, Incompatible, Planner, Rank, Region, TokenTurns, View, route
from kvxfer.geometry.turns import ALL, Shared
from tests.geometry.layouts import MOST, dealt
from tests.geometry.test_law import LAW


def turns(most: int, spans: int) -> st.SearchStrategy[TokenTurns]:
    """TokenTurns of at most so many ranks and tokens."""
    found = st.tuples(st.integers(0, most - 1), st.integers(1, most), st.integers(1, spans))
    return found.filter(lambda t: t[0] < t[1]).map(lambda t: TokenTurns(*t))


def cards(t: TokenTurns) -> dict[int, int]:
    return dealt(t.index, t.count, t.span)


@LAW
@given(turns(9, 9), st.integers(0, 300))
def test_tokens_before_are_counted(t: TokenTurns, token: int) -> None:
    assert t.before(token) == sum(other < token for other in cards(t))


@LAW
@given(turns(6, 5), turns(6, 5))
def test_the_share_is_that_of_one_period(src: TokenTurns, dst: TokenTurns) -> None:
    period = math.lcm(src.count * src.span, dst.count * dst.span)
    shared = [t for t in cards(src).keys() & cards(dst).keys() if t < period]
    if period <= MOST:
        assert Shared(src, dst).share == len(shared) / period


@LAW
@given(turns(16, 1), turns(16, 1))
def test_single_tokens_that_two_ranks_share_are_equally_far_apart(src: TokenTurns, dst: TokenTurns) -> None:
    shared, both = Shared(src, dst), sorted(cards(src).keys() & cards(dst).keys())
    if not both:
        assert not shared.share
        return
    assert shared.first == both[0] and {b - a for a, b in itertools.pairwise(both)} == {shared.step}
    if len(both) > 1:
        assert [cards(t)[both[1]] - cards(t)[both[0]] for t in (src, dst)] == [shared.src_step, shared.dst_step]


def cache(rank: int, held: TokenTurns | None, block: int = 12, token: int | None = 4, layers: int = 2) -> Cache:
    """A rank with latents of four bytes, or pages that are not cut, in blocks of ``block`` tokens of a request."""
    here = block if held is None else block // held.count
    names = tuple(f"l{i}" for i in range(layers))
    nbytes = here * 4 * 64
    view = View(
        "latent",
        0,
        names,
        tuple(i * nbytes for i in range(layers)),
        64,
        here * 4,
        4 if token else here * 4,
        "x",
        token_stride=token,
        turns=held,
    )
    found = Cache((Region(1 << 20, layers * nbytes),), (Group(block),), (view,), Rank(0, rank))
    found.check()
    return found


def engine(ranks: int, span: int = 1, replicas: int = 1, **more: Any) -> list[Cache]:
    return [
        cache(i, TokenTurns(i % ranks, ranks, span) if ranks > 1 else None, **more) for i in range(ranks * replicas)
    ]


def test_pages_that_are_not_cut_go_to_the_same_turns_only() -> None:
    found = route(engine(2, token=None), engine(2, token=None))
    assert {c.tp: [p.tp for p in r.assignments] for c, r in found.items()} == {0: [0], 1: [1]}
    for other in (engine(1, token=None), engine(2, 2, token=None), engine(3, token=None)):
        with pytest.raises(Incompatible, match=r"token \(opaque\): (turns|block tokens)"):
            route(engine(2, token=None), other)


def test_a_turn_that_nobody_has_is_named() -> None:
    with pytest.raises(Incompatible, match="turn 1 of 2"):
        route([cache(0, TokenTurns(0, 2)), cache(1, TokenTurns(0, 2))], engine(1))
    with pytest.raises(Incompatible, match="has only 2"):
        route(engine(3)[:2], engine(1))


def test_ranks_that_do_not_agree_on_their_turns_are_named() -> None:
    with pytest.raises(Incompatible, match=r"holds tokens of layer 'l0'.*TokenTurns\(index=1, count=3, span=1\)"):
        route([cache(0, TokenTurns(0, 2)), cache(1, TokenTurns(1, 3)), cache(2, TokenTurns(2, 3))], engine(1))


def test_forged_assignments_of_ranks_that_share_no_token_are_refused() -> None:
    one, other = engine(2)
    assigned = route(engine(2), [one])[Rank()].assignments[Rank()]
    with pytest.raises(Incompatible, match="no token of plane"):
        Planner(one, other, assigned)


@pytest.mark.parametrize(
    ("group", "held", "why"),
    [
        (Group(12), TokenTurns(0, 5), "whole rounds"),
        (Group(12), TokenTurns(0, 2, 4), "whole rounds"),
        (Group(12, "state"), TokenTurns(0, 2), "a state has no tokens"),
    ],
)
def test_descriptions_that_are_impossible_are_refused(group: Group, held: TokenTurns, why: str) -> None:
    one = cache(0, TokenTurns(0, 2), token=None)
    wrong = msgspec.structs.replace(one, groups=(group,), views=(msgspec.structs.replace(one.views[0], turns=held),))
    with pytest.raises(ArgumentError, match=why):
        wrong.check()


def test_a_cache_of_tensors_says_whose_turn_it_is() -> None:
    array = np.zeros((8, 4, 16), np.uint8)
    found = Cache.of_tensors({"latent": [array]}, "block token unit", turns=TokenTurns(1, 2, 2))
    assert found.groups == (Group(8),) and found.views[0].turns == TokenTurns(1, 2, 2)
    assert found.views[0].tokens(8) == 4 and found.views[0].held == TokenTurns(1, 2, 2)
    assert msgspec.structs.replace(found.views[0], turns=TokenTurns(0, 1, 4)).held == ALL
