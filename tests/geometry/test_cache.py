"""Descriptions of caches: malformed ones are refused, and content that shares bytes is found exactly."""

from __future__ import annotations

from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.geometry import Cache, Group, Heads, Rank, Region, View
from tests.geometry.engines import Case, cases

GOOD = Cache(
    (Region(4096, 1000), Region(65536, 1000)),
    (Group(4), Group(2, "window", 8)),
    (
        View("k", 0, ("a", "b"), (0, 500), 5, 96, 12, "x", Heads(2, 2, 8, 48), 12),
        View("latent", 1, ("c",), (8192,), 5, 100, 50, "x", None, 50),
    ),
)


def changed(view: int = 0, **fields: object) -> Cache:
    views = list(GOOD.views)
    views[view] = msgspec.structs.replace(views[view], **fields)
    return msgspec.structs.replace(GOOD, views=tuple(views))


def test_a_sound_description_passes() -> None:
    GOOD.check()
    assert GOOD.starts == (0, 8192)
    Cache((), (), ()).check()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (changed(group=2), "no such group"),
        (changed(group=-1), "no such group"),
        (changed(layers=("a",)), "one offset for each"),
        (changed(layers=("a", "a")), "distinct"),
        (changed(layers=(), offsets=()), "one offset for each"),
        (changed(blocks=0), "must be positive"),
        (changed(block_stride=0), "must be positive"),
        (changed(unit=-1), "must be positive"),
        (changed(heads=Heads(7, 2, 8, 48)), "not a range"),
        (changed(heads=Heads(-1, 2, 8, 48)), "not a range"),
        (changed(heads=Heads(2, 0, 8, 48)), "not a range"),
        (changed(heads=Heads(2, 2, 8, 0)), "strides must be positive"),
        (changed(heads=Heads(2, 2, 8, -48)), "strides must be positive"),
        (changed(token_stride=-12), "strides must be positive"),
        (changed(heads=Heads(0, 1 << 30, 1 << 30, 1)), "more than"),
        (changed(offsets=(0, 550)), "leaves every region"),
        (changed(offsets=(-1, 500)), "leaves every region"),
        (changed(offsets=(0, 1000)), "leaves every region"),
        (changed(blocks=1 << 60), "leaves every region"),
        (changed(block_stride=1 << 62), "leaves every region"),
        (changed(offsets=(0, 480 - 12)), "same bytes"),
        (changed(offsets=(0, 0)), "same bytes"),
        (changed(block_stride=90), "same bytes"),
        (changed(token_stride=11), "same bytes"),
        (changed(heads=Heads(2, 2, 8, 36)), "same bytes"),
        (changed(1, plane="k", layers=("b",)), "described twice"),
        (msgspec.structs.replace(GOOD, rank=Rank(0, -1)), "not a rank"),
        (msgspec.structs.replace(GOOD, groups=(Group(0), GOOD.groups[1])), "block_tokens"),
        (msgspec.structs.replace(GOOD, groups=(Group(4, "window"), GOOD.groups[1])), "window"),
        (msgspec.structs.replace(GOOD, groups=(Group(4, "full", 7), GOOD.groups[1])), "window"),
        (msgspec.structs.replace(GOOD, groups=(Group(4, "state"), GOOD.groups[1])), "no token axis"),
        (msgspec.structs.replace(GOOD, regions=(Region(4096, 0), GOOD.regions[1])), "not a piece of memory"),
        (msgspec.structs.replace(GOOD, regions=(Region(-1, 1000), GOOD.regions[1])), "not a piece of memory"),
        (msgspec.structs.replace(GOOD, regions=(Region(1, 1 << 59),) * 3), "larger than any"),
    ],
)
def test_a_malformed_description_is_refused(bad: Cache, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bad.check()


def test_groups_may_overlay_each_other() -> None:
    over = changed(1, offsets=(0,))
    over.check()


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_layout_of_the_zoo_passes(case: Case) -> None:
    for engine in (case.producer, case.consumer):
        for store in engine.stores.values():
            store.cache.check()


numbers = st.integers(1, 12)
views = st.builds(
    lambda offsets, blocks, stride, unit, heads, head, tokens: (offsets, blocks, stride, unit, heads, head, tokens),
    st.lists(st.integers(0, 60), min_size=1, max_size=3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 6),
    st.integers(1, 3), numbers, st.one_of(st.none(), numbers),
)  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(st.lists(views, min_size=1, max_size=2), st.integers(1, 3), st.booleans())
def test_shared_bytes_are_found_exactly(drawn: list, block_tokens: int, one_stride: bool) -> None:  # type: ignore[type-arg]
    """Against a set of all bytes. Oddities that no engine has may be refused without sharing any."""
    made, seen, shared = [], set(), False
    for i, (offsets, blocks, stride, unit, heads, head, token) in enumerate(drawn):
        stride = drawn[0][2] if one_stride else stride
        names = tuple(f"l{j}" for j in range(len(offsets)))
        made.append(
            View(f"p{i}", 0, names, tuple(offsets), blocks, stride, unit, "x", Heads(0, heads, heads, head), token)
        )
        for at, b, h, t in product(offsets, range(blocks), range(heads), range(block_tokens if token else 1)):
            for byte in range(unit):
                x = at + b * stride + h * head + t * (token or 0) + byte
                shared |= x in seen
                seen.add(x)
    cache = Cache((Region(0, 4096),), (Group(block_tokens),), tuple(made))
    try:
        cache.check()
        refused = False
    except ValueError as e:
        assert "same bytes" in str(e)
        refused = True
    odd = len({v.block_stride for v in made}) > 1 or len({v.blocks == 1 for v in made}) > 1
    if shared or not odd:
        assert refused == shared
