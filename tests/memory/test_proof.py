"""Whether a description is that of what an engine writes: right ones pass however pages are made, wrong ones are told
apart, and memory is as before."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from kvxfer.geometry import Cache, Group, Heads, Region, View
from kvxfer.memory.proof import Proof, Unproven, Write
from tests.data.elastic_pages import PAGE, ElasticPages

LAYERS, BLOCKS, HEADS, TOKENS, SIZE = 3, 70, 4, 16, 8
UNIT = 2 * SIZE  # bytes of bf16
NAMES = tuple(f"layer.{i}" for i in range(LAYERS))
INPUTS = {"k": (HEADS, SIZE), "v": (HEADS, SIZE)}

Store = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]


@dataclass
class Played:
    """An engine: its tensors, how it stores tokens (into a layer's tensor, at blocks and places in them), its description."""

    memory: torch.Tensor
    layers: list[torch.Tensor]
    store: Store
    cache: Cache
    inputs: dict[str, tuple[int, ...]]

    def differences(self, **change: Any) -> list[str | None]:
        """Of each layer, with every view of the description changed so. Memory must be as it was."""
        cache = (
            replace(self.cache, views=tuple(replace(v, **change) for v in self.cache.views)) if change else self.cache
        )
        return self.of(cache)

    def of(self, cache: Cache) -> list[str | None]:
        found = []
        for content in (torch.zeros_like(self.memory), torch.randint(256, self.memory.shape, dtype=torch.uint8)):
            self.memory.copy_(content)
            proof = Proof(cache)
            found.append([proof.difference(name, self.layers[i], self.write(i)) for i, name in enumerate(NAMES)])
            assert torch.equal(self.memory, content)
        assert [text is None for text in found[0]] == [text is None for text in found[1]]
        return found[0]

    def write(self, layer: int) -> Write:
        def call(values: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
            assert len(slots) == len(values[0])
            assert all(value.is_contiguous() for value in values), "kernels take the heads of a token as one row"
            self.store(self.layers[layer], values, slots // TOKENS, slots % TOKENS)

        return Write(self.inputs, torch.bfloat16, call)


def cache_of(memory: torch.Tensor, views: Sequence[View], tokens: int = TOKENS) -> Cache:
    return Cache((Region(memory.data_ptr(), memory.numel()),), (Group(tokens),), tuple(views))


def rows(axes: str, blocks: int = BLOCKS, memory: torch.Tensor | None = None) -> Played:
    """K and V of each head and token side by side, the axes (layer, block, head, token, content) in this order."""
    lengths = {"L": LAYERS, "B": blocks, "H": HEADS, "N": TOKENS, "C": 2 * SIZE}
    nbytes = 2 * LAYERS * blocks * HEADS * TOKENS * 2 * SIZE
    memory = torch.zeros(nbytes, dtype=torch.uint8) if memory is None else memory[:nbytes]
    t = memory.view(torch.bfloat16).view([lengths[a] for a in axes]).permute([axes.index(a) for a in "LBHNC"])
    _, block, head, token, _ = (2 * s for s in t.stride())
    offsets = tuple(2 * t.stride(0) * i for i in range(LAYERS))
    k = View("k", 0, NAMES, offsets, blocks, block, UNIT, "played", Heads(0, HEADS, HEADS, head), token)
    v = replace(k, plane="v", offsets=tuple(o + UNIT for o in offsets))

    def store(t: torch.Tensor, values: Sequence[torch.Tensor], block: torch.Tensor, token: torch.Tensor) -> None:
        t[block, :, token] = torch.cat(list(values), -1)

    return Played(memory, list(t), store, cache_of(memory, [k, v]), INPUTS)


def packed() -> Played:
    """[block, head, opaque]: a head's K by element, then its V by token, as kernels of CPUs like it."""
    engine = rows("LBHNC")
    pages = [t.view(BLOCKS, HEADS, 2, SIZE * TOKENS) for t in engine.layers]

    def store(t: torch.Tensor, values: Sequence[torch.Tensor], block: torch.Tensor, token: torch.Tensor) -> None:
        page = pages[next(i for i, layer in enumerate(engine.layers) if layer is t)]
        page[:, :, 0].view(BLOCKS, HEADS, SIZE, TOKENS)[block, :, :, token] = values[0]
        page[:, :, 1].view(BLOCKS, HEADS, TOKENS, SIZE)[block, :, token] = values[1]

    view = replace(engine.cache.views[0], plane="kv", unit=2 * UNIT * TOKENS, token_stride=None)
    return Played(engine.memory, engine.layers, store, cache_of(engine.memory, [view]), INPUTS)


def quantised(segregated: bool) -> Played:
    """A latent of 32 bytes a token, each row scaled: 4 bytes of scale behind every row, or behind all rows of the page."""
    size, scale = 32, 4
    memory = torch.zeros(LAYERS * BLOCKS * TOKENS * (size + scale), dtype=torch.uint8)
    layers = memory.view(LAYERS, BLOCKS, TOKENS, size + scale)

    def store(t: torch.Tensor, values: Sequence[torch.Tensor], block: torch.Tensor, token: torch.Tensor) -> None:
        scales = values[0].float().abs().amax(-1, keepdim=True) / 127
        row = (values[0].float() / scales).round().to(torch.int8).view(torch.uint8)
        if segregated:
            page = t.view(BLOCKS, -1)
            page[:, : size * TOKENS].unflatten(1, (TOKENS, size))[block, token] = row
            page[:, size * TOKENS :].unflatten(1, (TOKENS, scale))[block, token] = scales.view(torch.uint8)
        else:
            t[block, token] = torch.cat([row, scales.view(torch.uint8)], -1)

    page = TOKENS * (size + scale)
    offsets = tuple(BLOCKS * page * i for i in range(LAYERS))
    view = View("latent", 0, NAMES, offsets, BLOCKS, page, size + scale, "played", None, size + scale)
    return Played(memory, list(layers), store, cache_of(memory, [view]), {"latent": (size,)})


@pytest.mark.parametrize("axes", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BHLNC", "BLNHC"])
def test_right_descriptions_pass_in_any_order_of_axes(axes: str) -> None:
    assert rows(axes).differences() == [None] * LAYERS


@pytest.mark.parametrize("blocks", [4, 5, 9])
def test_few_blocks_take_turns(blocks: int) -> None:
    engine = rows("LBHNC", blocks)
    assert engine.differences() == [None] * LAYERS
    shifted = replace(engine.cache.views[0], token_stride=4 * UNIT)
    assert all(engine.of(cache_of(engine.memory, [shifted])))


def test_pages_that_are_packed_or_scaled_pass() -> None:
    assert packed().differences() == [None] * LAYERS
    assert quantised(segregated=False).differences() == [None] * LAYERS
    engine = quantised(segregated=True)
    whole = replace(engine.cache.views[0], unit=36 * TOKENS, token_stride=None)
    assert engine.of(cache_of(engine.memory, [whole])) == [None] * LAYERS


def test_whole_pages_pass_and_those_of_a_head_each() -> None:
    engine = rows("LBHNC")
    k = engine.cache.views[0]
    page = HEADS * TOKENS * 2 * UNIT
    whole = replace(
        k, plane="page", unit=page, heads=Heads(1, 1, 2, None), token_stride=None
    )  # of the second of two ranks
    assert engine.of(cache_of(engine.memory, [whole])) == [None] * LAYERS
    assert all(engine.of(cache_of(engine.memory, [replace(whole, unit=page - 2)])))
    engine = rows("LHBNC")
    k = engine.cache.views[0]
    assert k.heads is not None and k.heads.stride is not None
    pages = [
        replace(
            k,
            plane=f"page {h}",
            unit=page // HEADS,
            offsets=tuple(o + h * k.heads.stride for o in k.offsets),
            heads=Heads(1, 1, 2, None),
            token_stride=None,
        )
        for h in range(HEADS)
    ]
    assert engine.of(cache_of(engine.memory, pages)) == [None] * LAYERS


def test_values_first_and_then_scales_are_no_rows_of_tokens() -> None:
    found = quantised(segregated=True).differences()
    assert found[0] is not None
    assert "expected what the engine wrote of token 0 of plane 'latent'" in found[0]
    assert "what the engine wrote of token 1 of head 0 of latent in byte 32 of its 36" in found[0]
    assert all(found)


def test_heads_in_another_order() -> None:
    engine, store = rows("LBHNC"), rows("LBHNC").store
    engine.store = lambda t, values, block, token: store(t, [v.flip(1) for v in values], block, token)
    found = engine.differences()
    assert found[0] is not None
    assert "token 0 of head 0 of plane 'k' there; found what the engine wrote of token 0 of head 3 of k" in found[0]
    engine = packed()
    packs = engine.store
    engine.store = lambda t, values, block, token: packs(t, [v.roll(1, 1) for v in values], block, token)
    assert all(engine.differences())


@pytest.mark.parametrize(("one", "other"), [(0, 2), (1, 2), (2, 3)])
def test_any_two_heads_that_changed_places(one: int, other: int) -> None:
    engine, store = rows("LBNHC"), rows("LBNHC").store
    order = list(range(HEADS))
    order[one], order[other] = other, one
    engine.store = lambda t, values, block, token: store(t, [v[:, order] for v in values], block, token)
    assert all(engine.differences())


def test_head_and_token_strides_exchanged() -> None:
    engine = rows("LBHNC")
    k = engine.cache.views[0]
    assert k.heads is not None and k.heads.stride is not None and k.token_stride is not None
    found = engine.differences(heads=replace(k.heads, stride=k.token_stride), token_stride=k.heads.stride)
    assert found[0] is not None
    assert "token 1 of head 0 of plane 'k' there; found what the engine wrote of token 0 of head 1 of k" in found[0]


def test_k_and_v_exchanged() -> None:
    engine = rows("LBHNC")
    k, v = engine.cache.views
    found = engine.of(cache_of(engine.memory, [replace(k, plane="v"), replace(v, plane="k")]))
    assert found[0] is not None
    assert "plane 'v' there; found what the engine wrote of token 0 of head 0 of k in byte 0 of its 16" in found[0]


@pytest.mark.parametrize("axes", ["LBHNC", "BLHNC"])
def test_a_wrong_block_stride(axes: str) -> None:
    engine = rows(axes)
    stride = engine.cache.views[0].block_stride
    for wrong in (stride // 2, stride + UNIT, stride + 4 * UNIT):
        assert all(engine.differences(block_stride=wrong)), wrong


def test_a_unit_too_short_or_too_long() -> None:
    engine = rows("LBHNC")
    found = engine.differences(unit=UNIT - 2)
    assert found[0] is not None
    assert found[0].startswith("expected all that is written of a block in 'k', 'v'; found")
    assert "bytes that changed outside" in found[0]
    assert all(engine.differences(unit=UNIT + 2))


def test_a_layer_that_begins_elsewhere_though_the_others_are_right() -> None:
    for shift in (UNIT, 2 * UNIT, 4 * UNIT, HEADS * TOKENS * 2 * UNIT):
        engine = rows("LBHNC")
        views = [replace(v, offsets=(*v.offsets[:2], v.offsets[2] + shift)) for v in engine.cache.views]
        first, second, third = engine.of(cache_of(engine.memory, views))
        assert first is None and second is None, shift
        assert third is not None, shift


def test_a_layer_taken_for_another() -> None:
    engine = rows("LBHNC")
    found = engine.of(
        cache_of(engine.memory, [replace(v, offsets=(*v.offsets[:2], v.offsets[0])) for v in engine.cache.views])
    )
    words = "expected what the engine wrote of token 0 of head 0 of plane 'k' there; found bytes that it did not write"
    assert found == [None, None, words]


@pytest.mark.parametrize("axis", [1, None], ids=["heads", "inputs"])
def test_a_layer_that_writes_in_another_order_though_the_others_do_not(axis: int | None) -> None:
    engine, store = rows("LBNHC"), rows("LBNHC").store

    def third(t: torch.Tensor, values: Sequence[torch.Tensor], block: torch.Tensor, token: torch.Tensor) -> None:
        if t is engine.layers[2]:
            values = [v.flip(axis) for v in values] if axis is not None else values[::-1]
        store(t, values, block, token)

    engine.store = third
    found = engine.differences()
    assert found[:2] == [None, None]
    assert found[2] is not None


def test_bytes_behind_the_memory() -> None:
    engine = rows("LBHNC")
    found = engine.differences(offsets=tuple(engine.memory.numel() - 64 for _ in NAMES))
    words = "expected plane 'k' in the 430080 bytes that the layer's cache is in; found it in [430016, "
    assert all(text is not None and text.startswith(words) for text in found)


def test_another_number_of_heads() -> None:
    engine = rows("LBHNC")
    found = engine.differences(heads=Heads(0, 2, 2, 2 * UNIT * TOKENS))
    assert found[0] == "expected 2 heads of plane 'k'; found that 4 are written"


def test_a_write_beyond_its_block() -> None:
    engine, store = rows("LBHNC"), rows("LBHNC").store

    def spills(t: torch.Tensor, values: Sequence[torch.Tensor], block: torch.Tensor, token: torch.Tensor) -> None:
        store(t, values, block, token)
        t[-1, 0, 0, 0] = 7

    engine.store = spills
    before = [layer[-1, 0, 0, 0].clone() for layer in engine.layers]
    found = Proof(engine.cache).difference("layer.0", engine.layers[0], engine.write(0))
    assert found == "expected plane 'k' of blocks that nothing was written to as it was; found it changed"
    assert before[0] != engine.layers[0][-1, 0, 0, 0]


def test_what_cannot_be_found_out_is_said_before_anything_is_written() -> None:
    engine = rows("LBHNC", blocks=3)
    with pytest.raises(Unproven, match="3 blocks are too few"):
        engine.differences()
    state = replace(cache_of(engine.memory, engine.cache.views), groups=(Group(TOKENS, "state"),))
    with pytest.raises(Unproven, match="a state is not written by token"):
        engine.of(state)


def test_blocks_are_put_back_though_the_write_fails() -> None:
    engine, store = rows("LBHNC"), rows("LBHNC").store

    def fails(t: torch.Tensor, values: Sequence[torch.Tensor], block: torch.Tensor, token: torch.Tensor) -> None:
        store(t, values, block, token)
        raise RuntimeError("a kernel of another version")

    engine.store = fails
    engine.memory.fill_(3)
    with pytest.raises(Unproven, match="its write fails: a kernel of another version"):
        Proof(engine.cache).difference("layer.0", engine.layers[0], engine.write(0))
    assert bool((engine.memory == 3).all())


@pytest.fixture
def pages() -> Iterator[ElasticPages]:
    """An elastic cache at its start: all of it is one page."""
    found = ElasticPages(LAYERS * BLOCKS * 2 * UNIT * HEADS * TOKENS // PAGE + 1, 0)
    yield found
    assert not found.bytes.any(), "what all blocks share was not put back"
    found.close()


def found_in(engine: Played, cache: Cache) -> list[str | None]:
    proof = Proof(cache)
    return [proof.difference(name, engine.layers[i], engine.write(i)) for i, name in enumerate(NAMES)]


@pytest.mark.parametrize("mapped", [0, 1, 3], ids="{} mapped".format)
@pytest.mark.parametrize("axes", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_blocks_that_are_one_memory_yet(pages: ElasticPages, axes: str, mapped: int) -> None:
    """As kvcached's are: the right description passes, wrong ones are told; whatever has pages by then."""
    for page in range(mapped):
        pages.map(30 * page)
    engine = rows(axes, memory=torch.from_numpy(pages.bytes))
    k, v = engine.cache.views
    assert found_in(engine, engine.cache) == [None] * LAYERS
    assert all(found_in(engine, cache_of(engine.memory, [replace(k, plane="v"), replace(v, plane="k")])))
    short = [replace(view, unit=UNIT - 2) for view in engine.cache.views]
    assert all(found_in(engine, cache_of(engine.memory, short)))
    assert k.heads is not None and k.heads.stride is not None and k.token_stride is not None
    turned = replace(k.heads, stride=k.token_stride)
    exchanged = [replace(view, heads=turned, token_stride=k.heads.stride) for view in engine.cache.views]
    assert all(found_in(engine, cache_of(engine.memory, exchanged)))


def test_parts_of_a_block_that_are_one_memory_prove_nothing(pages: ElasticPages) -> None:
    engine = rows("LHBNC", 64, torch.from_numpy(pages.bytes))
    with pytest.raises(Unproven, match="its pages are not mapped yet"):
        found_in(engine, engine.cache)
