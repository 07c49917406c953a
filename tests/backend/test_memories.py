"""Flat offsets become addresses, and nothing that is not registered does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvxfer.backend.memories import Memories
from kvxfer.errors import TransportError
from kvxfer.geometry import Region
from kvxfer.geometry.region import flat_starts

REGIONS = (Region(1 << 20, 5000), Region(1 << 16, 4096), Region(1 << 30, 1))


def addresses(offsets: list[int], lengths: list[int], memory: int = 0) -> list[int]:
    memories = Memories()
    memories.add(REGIONS)
    return list(memories.addresses(memory, np.array(offsets, np.int64), np.array(lengths, np.int64)))


@given(offset=st.integers(-(2**62), 2**62), length=st.integers(-(2**62), 2**62))
def test_a_run_is_inside_one_region_or_refused(offset: int, length: int) -> None:
    inside = [
        r.address + offset - s
        for r, s in zip(REGIONS, flat_starts(REGIONS), strict=True)
        if s <= offset and 0 <= length and offset + length <= s + r.nbytes
    ]
    if inside:
        assert addresses([offset], [length]) == inside
    else:
        with pytest.raises(TransportError, match="outside"):
            addresses([offset], [length])


def test_the_bad_run_is_named() -> None:
    with pytest.raises(TransportError, match=r"run 1 \(offset 4999, 2 bytes\).*memory 0"):
        addresses([0, 4999], [1, 2])


def test_one_offset_a_length() -> None:
    with pytest.raises(TransportError):
        addresses([0, 1], [1])


@given(
    runs=st.lists(st.tuples(st.sampled_from([0, 1, 4000, 4999, 5000, 5096, 9095]), st.integers(0, 4096)), max_size=3)
)
def test_runs_are_addresses_and_bytes_without_the_empty(runs: list[tuple[int, int]]) -> None:
    memories = Memories()
    memories.add(REGIONS)
    offsets, lengths = (np.array([run[i] for run in runs], np.int64) for i in (0, 1))
    try:
        expected = [(at, n) for at, n in zip(memories.addresses(0, offsets, lengths), lengths, strict=True) if n]
    except TransportError as refused:
        with pytest.raises(TransportError) as e:
            memories.runs(0, offsets, lengths)
        assert str(e.value) == str(refused)
        return
    assert memories.runs(0, offsets, lengths) == expected
    assert memories.only(0, offsets, lengths) == (expected[0] if len(runs) == 1 and expected else None)


def test_numbers_are_never_used_twice() -> None:
    memories = Memories()
    assert [memories.add([]), memories.add([REGIONS[0]])] == [0, 1]
    assert memories.remove(1) == (REGIONS[0],)
    assert memories.add([]) == 2
    assert list(memories) == [0, 2] and 1 not in memories
    for call in (
        memories.remove,
        memories.regions,
        lambda n: memories.runs(n, np.zeros(1, np.int64), np.ones(1, np.int64)),
    ):
        with pytest.raises(TransportError, match="memory 1"):
            call(1)


def test_nothing_lies_in_an_empty_memory() -> None:
    memories = Memories()
    memories.add([])
    none = np.empty(0, np.int64)
    assert len(memories.addresses(0, none, none)) == 0
    with pytest.raises(TransportError):
        memories.addresses(0, np.array([0]), np.array([0]))


@pytest.mark.parametrize(
    "regions, words",
    [
        ([Region(0, 10)], "positive"),
        ([Region(10, 0)], "positive"),
        ([Region(10, 10, "cuda:1")], "moves cpu"),
        ([Region(100, 50), Region(10, 91)], "overlap"),
    ],
)
def test_impossible_regions_are_refused(regions: list[Region], words: str) -> None:
    with pytest.raises(TransportError, match=words):
        Memories().add(regions)


def test_neighbours_and_other_devices_do_not_overlap() -> None:
    Memories().add([Region(100, 50), Region(150, 50), Region(100, 50, "cuda:0")], frozenset({"cpu", "cuda"}))
