"""Caches of many layouts in host memory, copies of them on a device, and the plans between any two that fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvxfer import memory
from kvxfer.geometry import Cache, CopyPlan, Group, Planner, Region, route
from kvxfer.memory import Space
from kvxfer.memory.regions import Bytes

LAYERS, HEADS, BLOCKS = 2, 2, 7
TOKENS, START = 19, 2
"""Tokens of the request, and where what is moved begins."""


@dataclass(frozen=True)
class CacheLayout:
    """How a cache lies in memory."""

    content: str  # caches of one content can be joined
    block_tokens: int
    # Returns the tensors of each plane, and what their axes mean.
    make: Callable[[], tuple[Mapping[str, Any], str | Mapping[str, str]]]

    @property
    def wanted(self) -> tuple[int, int]:
        """The first of the tokens that are moved, and the one after the last."""
        return (0, TOKENS // self.block_tokens * self.block_tokens) if self.content == "pages" else (START, TOKENS)


def _planes(axes: str, block_tokens: int, units: Mapping[str, int], *, pad: int = 0) -> CacheLayout:
    """Return K and V (or other planes) in tensors of their own, with unused bytes behind each unit."""

    def make() -> tuple[Mapping[str, Any], str]:
        size = {"layer": LAYERS, "block": BLOCKS, "head": HEADS, "token": block_tokens}
        shape = [size[axis] for axis in axes.split()]
        return {p: np.zeros((*shape, n + pad), np.uint8)[..., :n] for p, n in units.items()}, f"{axes} unit"

    return CacheLayout(f"{units}", block_tokens, make)


def _by_layer(axes: str, block_tokens: int, units: Mapping[str, int]) -> CacheLayout:
    """Return a tensor for each layer and plane."""

    def make() -> tuple[Mapping[str, Any], str]:
        size = {"block": BLOCKS, "head": HEADS, "token": block_tokens}
        shape = [size[axis] for axis in axes.split()]
        return {p: [np.zeros((*shape, n), np.uint8) for _ in range(LAYERS)] for p, n in units.items()}, f"{axes} unit"

    return CacheLayout(f"{units}", block_tokens, make)


def _together(block_tokens: int, units: Mapping[str, int]) -> CacheLayout:
    """Return K and V of a head side by side, all layers of a block together."""

    def make() -> tuple[Mapping[str, Any], str]:
        whole = np.zeros((BLOCKS, LAYERS, block_tokens, HEADS, sum(units.values())), np.uint8)
        found, at = {}, 0
        for plane, n in units.items():
            found[plane] = whole[..., at : at + n]
            at += n
        return found, "block layer token head unit"

    return CacheLayout(f"{units}", block_tokens, make)


def _opaque(axes: str, pad: int = 0) -> CacheLayout:
    """Return pages that are never cut."""

    def make() -> tuple[Mapping[str, Any], str]:
        size = {"layer": LAYERS, "block": BLOCKS}
        shape = [size[axis] for axis in axes.split()]
        return {"page": np.zeros((*shape, 200 + pad), np.uint8)[..., :200]}, f"{axes} unit"

    return CacheLayout("pages", 4, make)


WIDE, ODD, LATENT = {"k": 64, "v": 64}, {"k": 7, "v": 10}, {"latent": 72}

LAYOUTS: Mapping[str, CacheLayout] = {
    "tokens first": _planes("layer block token head", 4, WIDE),
    "heads first": _planes("layer block head token", 6, WIDE),
    "blocks outermost": _planes("block layer head token", 8, WIDE),
    "heads outside blocks": _planes("head block layer token", 4, WIDE, pad=16),
    "a tensor for each layer": _by_layer("block token head", 4, WIDE),
    "k beside v": _together(3, WIDE),
    "odd, tokens first": _planes("layer block token head", 4, ODD),
    "odd, padded": _planes("layer block head token", 5, ODD, pad=3),
    "odd, k beside v": _together(4, ODD),
    "latent": _planes("layer block token", 4, LATENT),
    "latent, blocks outermost": _planes("block layer token", 6, LATENT, pad=8),
    "pages": _opaque("layer block"),
    "pages, blocks outermost": _opaque("block layer", pad=5),
}


@dataclass(frozen=True)
class Held:
    """A cache on a device, and the same in host memory."""

    layout: CacheLayout
    cache: Cache  # on the host
    space: Space  # on the device
    host: Space  # the space of ``cache``

    def blocks(self, seed: int) -> list[int]:
        """Return the blocks of a request, scattered."""
        order = np.random.default_rng(seed).permutation(BLOCKS)
        return [int(x) for x in order[: -(-TOKENS // self.layout.block_tokens)]]

    @property
    def on_device(self) -> Cache:
        """The cache whose regions are on the device."""
        return replace(self.cache, regions=self.space.regions)

    def image(self) -> list[Bytes]:
        """Return what the regions on the device hold."""
        return [rows_of(self.space, i, 0, r.nbytes) for i, r in enumerate(self.cache.regions)]

    def expected(self) -> list[Bytes]:
        """Return what the regions on the host hold."""
        return [rows_of(self.host, i, 0, r.nbytes) for i, r in enumerate(self.cache.regions)]


def rows_of(space: Space, region: int, at: int, nbytes: int) -> Bytes:
    """Return some bytes of a region."""
    out = np.empty((1, nbytes), np.uint8)
    space.gather(region, np.array([at]), out)
    return np.asarray(out[0])


def hold_cache(layout: CacheLayout, kind: type[Space], device: str, seed: int) -> Held:
    """Make a cache of this layout with random content, on a device and on the host."""
    tensors, dims = layout.make()
    cache = Cache.of_tensors(tensors, dims, group=Group(layout.block_tokens))
    host, random = memory.space(cache.regions), np.random.default_rng(seed)
    regions: list[Region] = []
    for i, r in enumerate(cache.regions):
        content = random.integers(0, 256, (1, r.nbytes), dtype=np.uint8)
        host.scatter(i, np.array([0]), content)
        one = kind.allocate(r.nbytes, device)
        one.scatter(0, np.array([0]), content)
        regions.append(one.region)
    return Held(layout, cache, kind(tuple(regions), device), host)


def layout_pairs() -> list[tuple[str, str]]:
    """Return the names of all layouts that can be joined, in order."""
    return [(a, b) for a, one in LAYOUTS.items() for b, other in LAYOUTS.items() if one.content == other.content]


def plan_between(src: Held, dst: Held) -> CopyPlan:
    """Return the plan of a request whose blocks are scattered on both sides."""
    planner = Planner(src.cache, dst.cache, route([src.cache], [dst.cache])[dst.cache.rank].assignments[src.cache.rank])
    return planner.plan([src.blocks(1)], [dst.blocks(2)], *src.layout.wanted)
