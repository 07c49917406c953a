"""Caches described from tensors: whatever their library, order of axes and gaps, copying along a plan is indexing them."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer import Agent, Config, memory
from kvxfer.errors import ArgumentError
from kvxfer.geometry import Cache, Group, Planner, Region, route
from kvxfer.values import BlockTable, Rank

LAYERS, BLOCKS, HEADS, TOKENS, UNIT = 2, 5, 3, 4, 6
SIZES = {"layer": LAYERS, "block": BLOCKS, "head": HEADS, "token": TOKENS}


class Array:
    """A numpy array that shows one of its interfaces alone."""

    def __init__(self, array: np.ndarray, interface: str) -> None:
        self._array, self._interface = array, interface

    def __getattr__(self, name: str) -> Any:
        if name != self._interface:
            raise AttributeError(name)
        return getattr(self._array, name)


def torch_of(array: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(array)


LIBRARIES = {
    "numpy": lambda array: array,
    "array interface": lambda array: Array(array, "__array_interface__"),
    "dlpack": lambda array: Array(array, "__dlpack__"),
    "torch": torch_of,
}


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[str], list[int], bool, str]:
    """The order of the axes, gaps at the end of each, whether each layer is a tensor of its own, and a library."""
    order = draw(st.permutations(sorted(SIZES)))
    gaps = draw(st.lists(st.integers(0, 2), min_size=5, max_size=5))
    return order, gaps, draw(st.booleans()), draw(st.sampled_from(sorted(LIBRARIES)))


def made(layout: tuple[list[str], list[int], bool, str], plane: int) -> tuple[np.ndarray, Any, str]:
    """An array as [layer, block, head, token, unit], its tensors, and their axes."""
    order, gaps, apart, library = layout
    shape = [*(SIZES[axis] for axis in order), UNIT]
    whole = np.zeros([n + gap for n, gap in zip(shape, gaps, strict=True)], np.int16)
    array = whole[tuple(slice(n) for n in shape)]
    logical = array.transpose([*(order.index(axis) for axis in ("layer", "block", "head", "token")), 4])
    logical[...] = np.arange(logical.size).reshape(logical.shape) + plane * 7919
    if not apart:
        return logical, LIBRARIES[library](array), " ".join([*order, "unit"])
    each = [LIBRARIES[library](np.moveaxis(array, order.index("layer"), 0)[i]) for i in range(LAYERS)]
    return logical, each, " ".join([*(axis for axis in order if axis != "layer"), "unit"])


@settings(deadline=None)
@given(st.lists(layouts(), min_size=4, max_size=4), st.booleans(), st.integers(1, 12), st.randoms())
def test_copying_along_a_plan_is_indexing(
    sides: list[tuple[list[str], list[int], bool, str]], apart: bool, tokens: int, random: Any
) -> None:
    """K and V of other layouts on either side, in planes of their own or in one."""
    caches, arrays = [], []
    for side in (sides[:2], sides[2:]):
        planes = {name: made(layout, i) for i, (name, layout) in enumerate(zip("kv", side, strict=True))}
        kept = planes if apart else {"k": planes["k"]}
        tensors = {name: found for name, (_, found, _) in kept.items()}
        caches.append(Cache.of_tensors(tensors, {name: dims for name, (*_, dims) in kept.items()}))
        arrays.append([logical for logical, *_ in kept.values()])
    src, dst = caches
    for logical in arrays[1]:
        logical[...] = -1
    n = -(-tokens // TOKENS)
    tables = [random.sample(range(BLOCKS), n) for _ in range(2)]
    plan = Planner(src, dst, route([src], [dst])[Rank()].assignments[Rank()]).plan(
        *map(BlockTable.of, zip(tables)), 0, tokens
    )
    staged = memory.allocate(plan.nbytes)
    memory.space(src.regions).pack(plan, staged)
    memory.space(dst.regions).unpack(plan, staged)
    for here, there in zip(*arrays, strict=True):
        expected = np.full_like(there, -1)
        for t in range(tokens):
            expected[:, tables[1][t // TOKENS], :, t % TOKENS] = here[:, tables[0][t // TOKENS], :, t % TOKENS]
        assert np.array_equal(there, expected)


def test_tensors_live_as_long_as_their_cache() -> None:
    class Held(np.ndarray):
        """An array that can be watched."""

    tensor = np.zeros((4, 2, 8), np.uint8).view(Held)
    cache, watched = Cache.of_tensors(tensor, "block token unit"), weakref.ref(tensor)
    region = cache.regions[0]
    del tensor
    gc.collect()
    assert watched() is not None
    del cache
    gc.collect()
    assert watched() is not None, "a region alone keeps its memory"
    assert pickle.loads(pickle.dumps(region)) == region
    del region
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize("elastic", [None, False, True])
def test_tensors_live_as_long_as_an_agent_over_them(elastic: bool | None) -> None:
    """Whatever the agent says of the regions on top of what they say themselves."""

    class Held(np.ndarray):
        """An array that can be watched."""

    tensor = np.zeros((4, 2, 8), np.uint8).view(Held)
    watched = weakref.ref(tensor)
    with Agent(Cache.of_tensors(tensor, "block token unit"), Config(elastic=elastic)):
        del tensor
        gc.collect()
        assert watched() is not None


def test_what_overlaps_is_one_region() -> None:
    """As K and V in turns in one allocation; registered twice, it would be two memories."""
    both = np.zeros((BLOCKS, 2, TOKENS, UNIT), np.uint8)
    cache = Cache.of_tensors({"k": both[:, 0], "v": both[:, 1]}, "block token unit")
    assert cache.regions == (Region(both.ctypes.data, both.nbytes),) and cache.regions[0] == Region.of(both)
    assert [view.offsets for view in cache.views] == [(0,), (TOKENS * UNIT,)]


def test_groups_are_added() -> None:
    full, window = (np.zeros((LAYERS, BLOCKS, TOKENS, UNIT), np.uint8) for _ in range(2))
    dims = "layer block token unit"
    both = Cache.of_tensors(full, dims) + Cache.of_tensors(
        window, dims, group=Group(TOKENS, "window", 16), layers=["a", "b"], encoding="e"
    )
    both.check()
    assert [(v.group, v.layers, v.encoding) for v in both.views] == [(0, ("0", "1"), "uint8"), (1, ("a", "b"), "e")]
    starts = both.starts
    assert [v.offsets[0] for v in both.views] == list(starts)


def test_tensors_without_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    dense = torch.zeros(4, 2, 3)
    for tensor in (torch.empty(4, 2, 3, device="meta"), dense.to_sparse(), dense.to_mkldnn()):
        with pytest.raises(ArgumentError, match=r"tensors\['kv'\] must have memory of its elements"):
            Cache.of_tensors(tensor, "block token unit")


@pytest.mark.parametrize("kind", ["quint4x2", "quint2x4", "shrunk", "nested", "transformed", "functional", "dlpack"])
def test_tensors_with_less_memory_than_elements_are_refused(kind: str) -> None:
    """A region of such a tensor would be of bytes that are another's."""
    torch = pytest.importorskip("torch")
    dense, found = torch.zeros(4, 2, 3), []
    if kind.startswith("quint"):
        tensor = torch.empty(4, 2, 8, dtype=getattr(torch, kind))
    elif kind == "shrunk":
        dense.untyped_storage().resize_(16)
        tensor = dense
    elif kind == "nested":
        tensor = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)])
    elif kind == "transformed":
        torch.vmap(lambda x: (found.append(x), x)[1])(dense)
        (tensor,) = found
    elif kind == "functional":
        tensor = torch._to_functional_tensor(dense)
    else:
        tensor = Array(dense.requires_grad_(), "__dlpack__")
    with pytest.raises(ArgumentError, match=r"^tensor must have memory of its elements"):
        Region.of(tensor)


def test_views_of_other_values_are_refused() -> None:
    """What lies in memory is not what the engine reads there, and a peer would take it for that."""
    torch = pytest.importorskip("torch")
    for tensor in (torch.zeros(4, 2, 3, dtype=torch.complex64).conj(), torch._neg_view(torch.zeros(4, 2, 3))):
        with pytest.raises(ArgumentError, match="must not be a conjugate or negative view"):
            Cache.of_tensors(tensor, "block token unit")


def test_memory_stays_though_its_tensor_is_given_other() -> None:
    """As by modules whose parameters are moved: ``tensor.data = other`` frees what the tensor held before."""
    torch = pytest.importorskip("torch")
    memory = np.full((4, 2, 3), 7, np.uint8)
    watched = weakref.ref(memory)
    tensor = torch.from_numpy(memory)
    region = Region.of(tensor)
    del memory
    tensor.data = torch.zeros(1, dtype=torch.uint8)
    gc.collect()
    assert watched() is not None
    del region
    gc.collect()
    assert watched() is None


def test_what_has_other_bytes_has_another_encoding() -> None:
    def encoding(tensor: Any) -> str:
        return Cache.of_tensors(tensor, "block token unit").views[0].encoding

    little, big = (np.zeros((4, 2, 3), f"{order}f4") for order in "<>")
    assert encoding(little) == encoding(torch_of(little)) == "float32" != encoding(big)
    one, other = (np.zeros((4, 2, 3), [("x", kind), ("y", "<i4")]) for kind in ("<i4", "<f4"))
    assert encoding(one) != encoding(other)
    bfloat16 = Array(np.zeros((4, 2, 3), "V2"), "__array_interface__")  # as ml_dtypes shows them: two bytes of anything
    bfloat16.dtype = "bfloat16"  # type: ignore[attr-defined]
    assert encoding(bfloat16) == "bfloat16"


@pytest.mark.parametrize(
    ("tensors", "dims", "more", "told"),
    [
        (np.zeros((4, 2)), "block slot", {}, "dims must be words of layer, .*'slot'"),
        (np.zeros((4, 2)), "token unit", {}, "dims must have 'block' once"),
        (np.zeros((4, 2, 3)), "block token", {}, "dims must name each of the 3 axes"),
        (np.zeros((4, 2)), 7, {}, "dims must be a str"),
        ({"k": np.zeros((4, 2))}, {"v": "block token"}, {}, "dims must name the axes of plane 'k'"),
        (
            np.zeros((4, 2, 3)).transpose(0, 2, 1),
            "block unit unit",
            {"group": Group(4)},
            "dims must name as 'unit' only",
        ),
        (np.zeros((4, 2)), "block unit", {}, "group must be given"),
        (np.zeros((4, 2, 3)), "block token unit", {"group": Group(3)}, "group must have blocks of as many tokens"),
        (
            np.zeros((4, 2, 3)),
            "layer block unit",
            {"layers": ["a"], "group": Group(1)},
            "layers must name each of the 4",
        ),
        ([], "block token unit", {}, "tensors must be at least one"),
        ("cache", "block token unit", {}, "must be a tensor .*not 'cache'"),
        (np.zeros((0, 2, 3)), "block token unit", {}, "must not be empty"),
        (np.zeros((4, 2, 3))[::-1], "block token unit", {}, "must not be empty or have overlapping elements"),
        (np.broadcast_to(np.zeros((1, 2, 3)), (4, 2, 3)), "block token unit", {}, "must be writable"),
        (np.zeros((4, 2, 3)), "block head unit", {"heads": 3, "group": Group(1)}, "heads must be"),
        (
            np.zeros((4, 2, 3)),
            "block head unit",
            {"heads": (3, 4), "group": Group(1)},
            r"heads\[0\] must be at most 2, not 3",
        ),
    ],
)
def test_what_is_no_cache_is_refused(tensors: Any, dims: Any, more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        Cache.of_tensors(tensors, dims, **more)
    assert isinstance(caught.value, ArgumentError) or "total" in told
