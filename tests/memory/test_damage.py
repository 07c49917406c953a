"""Damage that has a shape, which is what faults do: signs, lanes, halves, swaps, zeros. The checksum notices all of it, in every
dtype, whatever the content; and what is left to chance is as rare as its docstring says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvxfer import memory
from kvxfer.geometry import CopyPlan, Rank
from kvxfer.memory import rows
from kvxfer.memory.checksum import word_keys
from tests.geometry.engines import Case
from tests.geometry.layouts import KINDS, Bytes, Spec, Store
from tests.geometry.test_law import links, plan
from tests.geometry.test_pairs import copy, engine

LAYERS, HEADS, TOKENS, UNIT = ("l0", "l1"), 2, 8, 64
DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp64": 8}
"""Bytes of an item. The uppermost bit of each is its sign; of an fp8 or uint8 too it is one that matters."""


def content(dtype: str, seed: int) -> Bytes:
    """Units as a model leaves them, ``[layer, plane, head, token, UNIT]``: numbers around 0; for fp8 any bytes."""
    rng, shape = np.random.default_rng(seed), (len(LAYERS), 2, HEADS, TOKENS)
    numbers = rng.standard_normal((*shape, UNIT // DTYPES[dtype]))
    match dtype:
        case "fp8":
            return rng.integers(0, 256, (*shape, UNIT), dtype=np.uint8)
        case "bf16":
            return np.ascontiguousarray(numbers.astype("<f4").view("<u2")[..., 1::2]).view(np.uint8)
        case _:
            return numbers.astype({"fp32": "<f4", "fp16": "<f2", "fp64": "<f8"}[dtype]).view(np.uint8)


class Place:
    """A consumer's cache whose wanted units can be set to any content."""

    def __init__(self, layout: str) -> None:
        spec = Spec(KINDS[0], LAYERS, (UNIT, UNIT), HEADS)
        case = Case((spec,), engine(spec, "nhd", 4, 1, TOKENS, 1), engine(spec, layout, 4, 1, TOKENS, 2), 0, TOKENS)
        ((p, c, assignments),) = links(case)
        self.made: CopyPlan = plan(case, p, c, assignments)
        copy(self.made, case.producer.stores[p].image, case.consumer.stores[c].image)
        self.store: Store = case.consumer.stores[Rank()]
        self._space, (table,) = memory.space(self.store.cache.regions), case.consumer.tables
        self._cells = {
            (i, j, h, t): self.store.held[0, layer, plane].cell(int(table[t // 4]), h, t % 4)
            for i, layer in enumerate(LAYERS)
            for j, plane in enumerate("kv")
            for h in range(HEADS)
            for t in range(TOKENS)
        }

    def sum(self, content: Bytes) -> int:
        for at, cell in self._cells.items():
            cell[:] = content[at]
        return self._space.checksum(self.made, "destination").value


@pytest.fixture(params=[rows.by_numpy, rows.by_numba], ids=["numpy", "numba"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "best", lambda: request.param)


@pytest.fixture(scope="module", params=["hnd", "fa"])
def place(request: pytest.FixtureRequest) -> Place:
    return Place(request.param)


SCOPES: dict[str, tuple[object, ...]] = {
    "everything": (...,),
    "a layer": (1,),
    "a plane": (slice(None), 0),
    "a head": (slice(None), slice(None), 1),
    "every other token": (..., slice(None, None, 2), slice(None)),
    "a token": (..., 3, slice(None)),
    "a unit": (0, 1, 1, 5),
}


def lanes(bits: int) -> Iterator[Bytes]:
    """One bit of every lane of so many bits, as what is XORed to a unit; each bit in turn."""
    for bit in range(bits):
        yield np.frombuffer((1 << bit).to_bytes(bits // 8, "little") * (UNIT * 8 // bits), np.uint8)


def moved(step: int) -> Callable[[Bytes], Bytes]:
    return lambda x: np.roll(x, step, -1)


def swapped(axis: int) -> Callable[[Bytes], Bytes]:
    return lambda x: np.flip(x, axis)


def items(x: Bytes, kind: str, change: Callable[[Bytes], Bytes]) -> Bytes:
    return np.ascontiguousarray(change(np.ascontiguousarray(x).view(kind))).view(np.uint8)


SHAPES: dict[str, Callable[[Bytes], Bytes]] = {
    "all bits inverted": np.bitwise_not,
    "zeroed": np.zeros_like,
    **{f"filled with {n:#x}": lambda x, n=n: np.full_like(x, n) for n in (1, 0x7F, 0x80, 0xFF)},
    **{f"shifted by {n} bytes": moved(n) for n in (1, 2, 4, 8, 16, -1, -2, -4, -8, 32)},
    "second half zeroed": lambda x: np.concatenate([x[..., : UNIT // 2], np.zeros_like(x[..., UNIT // 2 :])], -1),
    "second half as the first": lambda x: np.concatenate([x[..., : UNIT // 2]] * 2, -1),
    "upper half of each word as the lower": lambda x: items(x, "<u8", lambda w: w & 0xFFFFFFFF | w << np.uint64(32)),
    "halves of each word swapped": lambda x: items(x, "<u8", lambda w: w << np.uint64(32) | w >> np.uint64(32)),
    **{f"bytes of each {k} swapped": lambda x, k=k: items(x, k, np.ndarray.byteswap) for k in ("<u2", "<u4", "<u8")},
    "words in reverse": lambda x: items(x, "<u8", lambda w: w[..., ::-1]),
    "halves of words in reverse": lambda x: items(x, "<u4", lambda w: w[..., ::-1]),
    "one added to each word": lambda x: items(x, "<u8", lambda w: w + np.uint64(1)),
    "2**63 added to each word": lambda x: items(x, "<u8", lambda w: w + np.uint64(1 << 63)),
    "one added to each half": lambda x: items(x, "<u4", lambda w: w + np.uint32(1)),
    "the same added to both halves": lambda x: items(x, "<u8", lambda w: w ^ np.uint64(0x1234567812345678)),
}

EXCHANGES: dict[str, Callable[[Bytes], Bytes]] = {
    "layers": swapped(0),
    "planes": swapped(1),
    "heads": swapped(2),
    "tokens in reverse": swapped(3),
    "tokens one later": lambda x: np.roll(x, 1, 3),
    "blocks": lambda x: np.roll(x, 4, 3),
    "all as the first token": lambda x: np.broadcast_to(x[:, :, :, :1], x.shape),
    "all as the first head": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


def noticed(place: Place, good: Bytes, damaged: Bytes) -> bool:
    return np.array_equal(good, damaged) or place.sum(damaged) != place.sum(good)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("each_way")
def test_damage_with_a_shape_is_noticed(place: Place, dtype: str) -> None:
    clean = content(dtype, 1)
    damages = SHAPES | {"negated": lambda x: x ^ list(lanes(8 * DTYPES[dtype]))[-1]}
    for what, change in damages.items():
        for where, scope in SCOPES.items():
            bad = clean.copy()
            bad[scope] = change(clean[scope])
            assert noticed(place, clean, bad), f"{where}: {what}"
    for what, change in EXCHANGES.items():
        assert noticed(place, clean, np.ascontiguousarray(change(clean))), f"exchanged {what}"


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.usefixtures("each_way")
def test_a_bit_inverted_in_every_lane_is_noticed(place: Place, bits: int) -> None:
    """Each bit, over content of each sort and over zeros, where it cannot hide in carries."""
    for clean in (np.zeros_like(content("fp8", 0)), *(content(dtype, 2) for dtype in DTYPES)):
        for bit, lane in enumerate(lanes(bits)):
            for where, scope in SCOPES.items():
                bad = clean.copy()
                bad[scope] ^= lane
                assert noticed(place, clean, bad), f"{where}: bit {bit}"


@pytest.mark.usefixtures("each_way")
def test_two_bits_alike_do_not_cancel() -> None:
    """The same bit, inverted in any two words of a unit: of all that a sum could let cancel, the most likely."""
    place, clean, seen = Place("hnd"), content("fp32", 3), set()
    halves = UNIT // 4
    for bit in (0, 15, 30, 31):
        for a in range(halves):
            for b in range(a):
                bad = clean.copy()
                bad[1, 0, 1, 2].view("<u4")[[a, b]] ^= np.uint32(1 << bit)
                seen.add(place.sum(bad))
    assert len(seen - {place.sum(clean)}) == 4 * halves * (halves - 1) // 2


ANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


@ANY
@given(st.data())
def test_any_pattern_repeated_anywhere_is_noticed(data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(PLACES), "place")()
    clean = content(data.draw(st.sampled_from(sorted(DTYPES)), "dtype"), data.draw(st.integers(0, 9), "seed"))
    period = data.draw(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), "period")
    pattern = np.frombuffer(data.draw(st.binary(min_size=period, max_size=period), "pattern"), np.uint8)
    scope = SCOPES[data.draw(st.sampled_from(sorted(SCOPES)), "scope")]
    bad = clean.copy()
    match data.draw(st.sampled_from(["xor", "fill", "and", "or", "add"]), "how"):
        case "xor":
            bad[scope] ^= np.tile(pattern, UNIT // period)
        case "fill":
            bad[scope] = np.tile(pattern, UNIT // period)
        case "and":
            bad[scope] &= np.tile(pattern, UNIT // period)
        case "or":
            bad[scope] |= np.tile(pattern, UNIT // period)
        case "add":
            bad[scope] += np.tile(pattern, UNIT // period)
    assume(not np.array_equal(bad, clean))
    assert noticed(place, clean, bad)


_made: dict[str, Place] = {}
PLACES = [
    lambda layout=layout: _made.setdefault(layout, _made.get(layout) or Place(layout)) for layout in ("hnd", "fi")
]


def test_no_shape_of_damage_has_more_than_its_chance() -> None:
    """The argument of the docstring, gone through in full at a quarter of the width: words of 8 bits, keys of 16. Whatever the
    other words and their keys add up to, of all odd keys that one damaged word could have had, no more than one in 2**8
    makes up for it."""
    keys = np.arange(1, 1 << 16, 2)
    for damage in range(1, 1 << 8):
        assert np.bincount(damage * keys % (1 << 16)).max() / len(keys) <= 1 / (1 << 8)


SIGNS = {
    "bit 0 of bytes": 0x01010101,
    "bit 7 of bytes": 0x80808080,
    "signs of 16 bits": 0x80008000,
    "signs of 32 bits": 0x80000000,
}


@pytest.mark.parametrize("damage", SIGNS, ids=str)
@pytest.mark.parametrize("words", [4, 32, 128])
def test_digests_of_the_damaged_are_as_rare_as_drawn_ones(damage: str, words: int) -> None:
    """The keys that are used, on much content, by the uppermost 12 bits of how far the damage moves a digest: 0, as it would be
    if it were missed, comes up no more often than by chance."""
    n, mask = 1 << 17, np.uint64(SIGNS[damage])
    keys = word_keys(words)
    before = np.random.default_rng(words).integers(0, 1 << 32, (n, words), np.uint64)
    change = (before ^ mask) - before
    zeros = int(((change * keys).sum(axis=1) >> np.uint64(52) == 0).sum())
    expected = n / (1 << 12)
    assert abs(zeros - expected) < 6 * expected**0.5
