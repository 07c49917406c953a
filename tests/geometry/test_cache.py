"""Descriptions of caches: malformed ones are refused, and content that shares bytes is found exactly."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from itertools import permutations, product

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, Group, Heads, Region, View
from tests.counting import calls
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
        (msgspec.structs.replace(GOOD, groups=(Group(4, "state"), GOOD.groups[1])), "no token axis"),
        (msgspec.structs.replace(GOOD, regions=(Region(4096, 0), GOOD.regions[1])), "not a piece of memory"),
        (msgspec.structs.replace(GOOD, regions=(Region(-1, 1000), GOOD.regions[1])), "not a piece of memory"),
        (msgspec.structs.replace(GOOD, regions=(Region(1, 1 << 59),) * 3), "larger than any"),
    ],
)
def test_a_malformed_description_is_refused(bad: Cache, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        bad.check()


def wide(order: str, layers: int, heads: int, tokens: int, blocks: int = 1000) -> Cache:
    """K and V side by side in the content, axes in this order (L layer, B block, H head, N token)."""
    size, at, strides = {"L": layers, "B": blocks, "H": heads, "N": tokens}, 256, {}
    for axis in reversed(order):
        strides[axis] = at
        at *= size[axis]
    names = tuple(f"model.layers.{i}.self_attn.attn" for i in range(layers))
    views = tuple(
        View(
            plane,
            0,
            names,
            tuple(i * strides["L"] + plane_at for i in range(layers)),
            blocks,
            strides["B"],
            128,
            "x",
            Heads(0, heads, heads, strides["H"]),
            strides["N"],
        )
        for plane, plane_at in (("k", 0), ("v", 128))
    )
    return Cache((Region(0, at),), (Group(tokens),), views)


FEW = 250_000
"""Calls of functions that a check may take: a tenth of a second."""


@pytest.mark.parametrize("order", ["".join(p) for p in permutations("LBHN")])
def test_the_largest_caches_pass_soon(order: str) -> None:
    """Whatever their layout, and however many pieces a block holds."""
    for cache in (wide(order, 80, 128, 256), wide(order, 126, 8, 2048), wide(order, 126, 128, 16)):
        assert calls(cache.check) < FEW


def layered(n: int) -> tuple[str, ...]:
    return tuple(map(str, range(n)))


def one(*views: View, tokens: int = 64) -> Cache:
    return Cache((Region(0, 1 << 59),), (Group(tokens),), views)


HOSTILE = {
    "pieces apart": one(View("k", 0, ("a",), (0,), 1, 1 << 32, 1, "x", Heads(0, 2048, 2048, 3), 3 * 2048), tokens=2048),
    "layers": one(
        View("k", 0, layered(4), tuple(i << 33 for i in range(4)), 1, 1 << 32, 1, "x", Heads(0, 1024, 1024, 3), 3072),
        tokens=1024,
    ),
    "no nesting": one(View("k", 0, ("a",), (0,), 5, 1 << 22, 1, "x", Heads(0, 128, 128, 65), 66)),
    "no nesting, more": one(
        View("k", 0, ("a",), (0,), 1, 1 << 42, 1, "x", Heads(0, 2048, 2048, 2049), 2050), tokens=2000
    ),
    "many strides": one(
        *(
            View(
                f"k{j}",
                0,
                layered(8),
                tuple((8 * j + i) << 34 for i in range(8)),
                1000,
                (1 << 20) + j,
                1,
                "x",
                Heads(0, 64, 64, 100 + j),
                (1 << 15) + j,
            )
            for j in range(512)
        ),
        tokens=8,
    ),
    "many views in one place": one(
        *(
            View(f"k{j}", 0, layered(8), tuple((8 * j + i) << 3 for i in range(8)), 1000, (1 << 20) + j, 1, "x")
            for j in range(512)
        )
    ),
    "many layers, interleaved": one(
        View("k", 0, layered(4096), tuple(i * ((1 << 30) + 7) for i in range(4096)), 1000, 1 << 20, 1 << 20, "x")
    ),
    "many groups": Cache(
        (Region(0, 1 << 59),),
        (Group(64),) * 128,
        tuple(View("k", g, (str(g),), (0,), 5, 1 << 22, 1, "x", Heads(0, 128, 128, 65), 66) for g in range(128)),
    ),
    "many regions": Cache(
        (Region(0, 1 << 40),) * 4096,
        (Group(64),),
        (View("k", 0, layered(4096), tuple(i * ((1 << 40) + 4096) for i in range(4096)), 3, 1 << 20, 1, "x"),),
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_no_description_costs_much(what: str) -> None:
    """Sound or not. They come from strangers, and the smallest of these have 300 bytes."""
    tracemalloc.start()
    try:
        with suppress(ArgumentError):
            HOSTILE[what].check()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20

    def check() -> None:
        with suppress(ArgumentError):
            HOSTILE[what].check()

    assert calls(check) < FEW


@pytest.mark.parametrize(
    ("cache", "what"),
    [
        (Cache((Region(0, 1),) * 5000, (), ()), "regions"),
        (Cache((), (Group(1),) * 200, ()), "groups"),
        (one(*(View(f"{i}", 0, ("a",), (0,), 1, 1, 1, "x") for i in range(600))), "views"),
        (one(*(View(f"{i}", 0, layered(1000), (0,) * 1000, 1, 1, 1, "x") for i in range(6))), "layers"),
        (one(View("k", 0, layered(1000), (0,) * 1000, 1, 1, 1, "x", Heads(0, 1000, 1000, 1))), "heads"),
    ],
)
def test_what_is_larger_than_any_engine_is_refused(cache: Cache, what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}.* are more than"):
        cache.check()


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_layout_of_the_zoo_passes(case: Case) -> None:
    for engine in (case.producer, case.consumer):
        for store in engine.stores.values():
            store.cache.check()


numbers = st.integers(1, 12)
views = st.builds(
    lambda offsets, blocks, stride, unit, heads, head, tokens: (offsets, blocks, stride, unit, heads, head, tokens),
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(1, 6),
    st.integers(1, 3),
    numbers,
    st.one_of(st.none(), numbers),
)


@settings(max_examples=600, deadline=None)
@given(st.lists(views, min_size=1, max_size=2), st.integers(1, 3), st.booleans())
@example([([8], 2, 10, 4, 1, 1, None), ([20], 2, 10, 1, 1, 1, None)], 1, True)  # beyond the stride into the next block
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
