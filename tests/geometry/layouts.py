"""Every layout the tests know: real numpy arrays, described for the code under test and indexed by the reference.

A layout is a function that carves arrays of the shape its name says out of a rank's memory, and hands out one array for
each layer and plane together with the names of its axes (B block, H head, N token; the last axis is the content).
The reference only ever indexes these arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvxfer.geometry import Cache, Group, Heads, Rank, Region, TokenTurns, View

MOST = 1000
"""More tokens than any request has."""

Bytes = NDArray[np.uint8]
Carve = Callable[..., Bytes]
Planes = tuple[tuple[str, int], ...]  # name, content bytes of one token and head
Found = Iterator[tuple[str, str, Bytes, str]]  # layer, plane, array, axes


def fa(carve: Carve, layers: list[str], planes: Planes, h: int, n: int, b: int) -> Found:
    """FlashAttention, one region a layer: [2, B, N, H, D]."""
    (k, d), (v, _) = planes
    for layer in layers:
        a = carve(2, b, n, h, d)
        yield layer, k, a[0], "BNH"
        yield layer, v, a[1], "BNH"


def fi(carve: Carve, layers: list[str], planes: Planes, h: int, n: int, b: int) -> Found:
    """FlashInfer, one region a layer: [B, 2, N, H, D]."""
    (k, d), (v, _) = planes
    for layer in layers:
        a = carve(b, 2, n, h, d)
        yield layer, k, a[:, 0], "BNH"
        yield layer, v, a[:, 1], "BNH"


def split(carve: Carve, layers: list[str], planes: Planes, h: int, n: int, b: int) -> Found:
    """K and V in tensors of their own, one token-major and one head-major."""
    (k, dk), (v, dv) = planes
    for layer in layers:
        yield layer, k, carve(b, n, h, dk), "BNH"
        yield layer, v, carve(b, h, n, dv), "BHN"


def _packed(axes: str, *, pad: int = 0) -> Callable[..., Found]:
    """K and V packed in the content, axes in the given order (L layer); ``pad`` unused bytes end every content."""

    def layout(carve: Carve, layers: list[str], planes: Planes, h: int, n: int, b: int) -> Found:
        size = {"L": len(layers), "B": b, "H": h, "N": n}
        a = carve(*(size[x] for x in axes), sum(d for _, d in planes) + pad)
        for i, layer in enumerate(layers):
            at = 0
            whole = a[tuple(i if x == "L" else slice(None) for x in axes)]
            for plane, d in planes:
                yield layer, plane, whole[..., at : at + d], axes.replace("L", "")
                at += d

    return layout


def _padded_pages(carve: Carve, layers: list[str], planes: Planes, h: int, n: int, b: int) -> Found:
    """[L, B, N, H, C] with room for one token more in every page."""
    a = carve(len(layers), b, n + 1, h, sum(d for _, d in planes))
    for i, layer in enumerate(layers):
        at = 0
        for plane, d in planes:
            yield layer, plane, a[i, :, :n, :, at : at + d], "BNH"
            at += d


SPLIT = {"fa": fa, "fi": fi}  # need K and V of one size
ATTENTION: dict[str, Callable[..., Found]] = {
    **SPLIT,
    "split": split,
    "hnd": _packed("LBHN"),
    "nhd": _packed("LBNH"),
    "lhbnc": _packed("LHBN"),
    "blhnc": _packed("BLHN"),
    "blnhc": _packed("BLNH"),
    "bhlnc": _packed("BHLN"),
    "padded heads": _packed("LBHN", pad=3),
    "padded pages": _padded_pages,
}
MLA = {"mla": _packed("LBN"), "mla outer": _packed("BLN"), "mla padded": _packed("LBN", pad=4)}
CPU = {"cpu": _packed("LBH"), "cpu outer": _packed("BLH")}
FUSED = {"fused heads": _packed("LBN"), "fused heads outer": _packed("BLN", pad=1)}
STATE = {"mamba": _packed("LB"), "mamba outer": _packed("BL"), "mamba padded": _packed("LB", pad=5)}


@dataclass(frozen=True)
class Kind:
    """A sort of content: its layouts, and which axes it has and may cut."""

    name: str
    layouts: dict[str, Callable[..., Found]]
    planes: tuple[str, ...]
    headed: bool = True
    cut_tokens: bool = True
    cut_heads: bool = True
    group: str = "full"


KINDS = (
    Kind("attention", ATTENTION, ("k", "v")),
    Kind("window", ATTENTION, ("k", "v"), group="window"),
    Kind("mla", MLA, ("latent",), headed=False),
    Kind("cpu", CPU, ("kv",), cut_tokens=False),
    Kind("fused", FUSED, ("kv",), cut_heads=False),
    Kind("state", STATE, ("conv", "ssm"), headed=False, cut_tokens=False, group="state"),
)


@dataclass(frozen=True)
class Spec:
    """One group of a model: what both engines agree on. ``sizes``: content bytes of a token and head, by plane."""

    kind: Kind
    layers: tuple[str, ...]
    sizes: tuple[int, ...]
    heads: int
    window: int = 0

    def held(self, tp: int, rank: int) -> tuple[int, int]:
        """The heads that a rank holds: a share, or one replica where there are more ranks than heads."""
        if not self.kind.headed:
            return 0, 1
        lo = rank * self.heads // tp
        return lo, max(lo + 1, (rank + 1) * self.heads // tp)


@cache
def dealt(index: int, ranks: int, span: int) -> dict[int, int]:
    """The tokens that a rank has and how many it has before each, if tokens are dealt out like cards, ``span`` at a time."""
    hands: list[list[int]] = [[] for _ in range(ranks)]
    deck = list(range(MOST))
    for turn in range(MOST):
        hands[turn % ranks] += deck[:span]
        deck = deck[span:]
    return {token: i for i, token in enumerate(hands[index])}


@dataclass(frozen=True)
class Held:
    """One plane of one layer as one rank holds it. ``turn``: see ``dealt``."""

    spec: Spec
    array: Bytes
    axes: str
    heads: tuple[int, int]
    turn: tuple[int, int, int] = (0, 1, 1)

    def own(self, token: int) -> int | None:
        """How many of a request's tokens before this one are held here, or None if this one is not."""
        return dealt(*self.turn).get(token)

    def cell(self, block: int, head: int, token: int) -> Bytes:
        """The content at a block, a global head and a token within the block; opaque axes are ignored."""
        index = {"B": block, "H": head - self.heads[0], "N": token}
        return self.array[tuple(index[x] for x in self.axes)]


@dataclass
class Store:
    """One rank's cache: description, memory as a flat image, and every (group, layer, plane) that it holds."""

    cache: Cache
    image: Bytes
    held: dict[tuple[int, str, str], Held]


def build(
    rank: Rank,
    tp: int,
    specs: tuple[Spec, ...],
    layers: tuple[tuple[str, ...], ...],
    layouts: tuple[str, ...],
    block_tokens: tuple[int, ...],
    blocks: int,
    seed: int,
    turns: tuple[tuple[int, int], ...] = (),
) -> Store:
    """A rank's store: for each group its spec, the layers it has, the name of its layout and its block size.

    ``turns``: for each group how many ranks take turns, and the tokens of a turn. Such ranks follow each other.
    """
    image = np.zeros(1 << 24, np.uint8)
    rng = np.random.default_rng(seed)
    regions: list[Region] = []
    end = 0

    def carve(*shape: int) -> Bytes:
        nonlocal end
        size = int(np.prod(shape))
        part = image[end : end + size]
        part[:] = rng.integers(0, 256, size, dtype=np.uint8)
        regions.append(Region(part.ctypes.data, size))
        end += -(-size // 4096) * 4096 + 4096
        return part.reshape(shape)

    held: dict[tuple[int, str, str], Held] = {}
    views: dict[tuple[object, ...], tuple[list[str], list[int]]] = {}
    every = turns or ((1, 1),) * len(specs)
    for g, (spec, mine, layout, whole) in enumerate(zip(specs, layers, layouts, block_tokens, strict=True)):
        if not mine:
            continue
        ranks, span = every[g]
        turn, n = (rank.tp % ranks, ranks, span), whole // ranks
        kind, heads = spec.kind, spec.held(tp // ranks, rank.tp // ranks)
        count = heads[1] - heads[0]
        scale = (1 if kind.cut_heads else count) * (1 if kind.cut_tokens or kind.group == "state" else n)
        planes = tuple((p, d * scale) for p, d in zip(kind.planes, spec.sizes, strict=True))
        for layer, plane, array, axes in kind.layouts[layout](carve, list(mine), planes, count, n, blocks):
            held[g, layer, plane] = Held(spec, array, axes, heads, turn)
            stride = {x: array.strides[i] for i, x in enumerate(axes)}
            named = Heads(heads[0], count, spec.heads, stride.get("H")) if kind.headed else None
            key = plane, g, stride["B"], array.shape[-1], named, stride.get("N")
            names, offsets = views.setdefault(key, ([], []))
            names.append(layer)
            offsets.append(array.ctypes.data - image.ctypes.data)
    groups = tuple(Group(n, s.kind.group, s.window) for s, n in zip(specs, block_tokens, strict=True))  # type: ignore[arg-type]
    described = tuple(
        View(
            plane,
            g,
            tuple(names),
            tuple(offsets),
            blocks,
            block,
            unit,
            f"{specs[g].kind.name}/{plane}",
            heads,
            token,
            turns=TokenTurns(rank.tp % every[g][0], *every[g]) if every[g][0] > 1 else None,
        )
        for (plane, g, block, unit, heads, token), (names, offsets) in views.items()  # type: ignore[misc]
    )
    return Store(Cache(tuple(regions), groups, described, rank), image[:end], held)
