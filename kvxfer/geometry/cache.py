"""A worker's KV cache as values: regions of memory, and strided views with named axes over them.

Everything here is plain data that crosses the wire in a hello (msgspec). Nothing touches memory.

The axes of a view are *block, head, token* and the contiguous *unit* below them; *layer* and *plane* (``k``,
``v``, ``latent``, ``state`` ...) name the view itself. Any of head and token may be missing, and either may be
*opaque*: present in the content, but not to be cut. A CPU-attention page, packed for the instruction set, is
[block, head, opaque]; a Mamba page is [block, opaque].
"""

from __future__ import annotations

from itertools import accumulate
from typing import Literal

import msgspec

__all__ = ["Cache", "Group", "Heads", "Rank", "Region", "View"]

GAP = 4096
"""Bytes between two regions in the flat offset space, so that no run can span both."""


class Region(msgspec.Struct, frozen=True):
    """One piece of registered memory. ``device`` is ``"cpu"`` or ``"cuda:N"`` (N as the owner counts)."""

    address: int
    nbytes: int
    device: str = "cpu"


class Rank(msgspec.Struct, frozen=True, order=True):
    """A worker's place in its engine: pipeline stage and tensor-parallel rank."""

    pp: int = 0
    tp: int = 0


class Group(msgspec.Struct, frozen=True):
    """Layers that share one block table.

    ``full``: every token of the request has a place. ``window``: only the last ``window`` tokens must; blocks
    before them may be null. ``state``: one block holds the state after a token, tables are paired by position.
    ``block_tokens`` is the number of tokens a block of the *table given to the planner* holds.
    """

    block_tokens: int
    kind: Literal["full", "window", "state"] = "full"
    window: int = 0


class Heads(msgspec.Struct, frozen=True):
    """The head axis: this worker holds the global KV heads ``[start, start + count)`` of ``total``.

    ``stride`` is in bytes; ``None`` says that the heads are inside the unit and must not be cut (opaque).
    """

    start: int
    count: int
    total: int
    stride: int | None


class View(msgspec.Struct, frozen=True):
    """One plane of all layers of a group that share shape and strides.

    The byte of (layer l, block b, head h, token t) is at flat offset ``offsets[l] + b * block_stride +
    (h - heads.start) * heads.stride + t * token_stride``, and ``unit`` bytes follow it.

    ``heads is None``: the content has no head axis (MLA), every tensor-parallel rank holds a replica.
    ``token_stride is None``: the tokens of a block are inside the unit and must not be cut (opaque).
    ``encoding`` names everything else the bytes depend on (dtype, quantisation, packing and its ISA, where
    scales live); it is compared, never interpreted.
    """

    plane: str
    group: int
    layers: tuple[str, ...]
    offsets: tuple[int, ...]
    blocks: int
    block_stride: int
    unit: int
    encoding: str
    heads: Heads | None = None
    token_stride: int | None = None

    def extent(self, block_tokens: int) -> int:
        """Bytes from a layer's offset to the end of its last block's content."""
        end = (self.blocks - 1) * self.block_stride + self.unit
        if self.heads is not None and self.heads.stride is not None:
            end += (self.heads.count - 1) * self.heads.stride
        if self.token_stride is not None:
            end += (block_tokens - 1) * self.token_stride
        return end


class Cache(msgspec.Struct, frozen=True):
    """All that a peer must know of a worker's cache to plan copies from it or into it."""

    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    views: tuple[View, ...]
    rank: Rank = Rank()

    @property
    def starts(self) -> tuple[int, ...]:
        """Flat offset at which each region begins. Regions are laid out in order, ``GAP`` bytes apart."""
        return flat_starts(self.regions)

    def check(self) -> None:
        """Raise ``ValueError`` when a view is malformed or leaves its region."""
        starts = self.starts
        for v in self.views:
            what = f"view {v.plane!r} of group {v.group}"
            if not 0 <= v.group < len(self.groups):
                raise ValueError(f"{what}: no such group; there are {len(self.groups)}")
            if len(v.layers) != len(v.offsets) or not v.layers or len(set(v.layers)) != len(v.layers):
                raise ValueError(f"{what}: needs one offset for each of its (distinct) layers")
            if min(v.blocks, v.unit, v.block_stride) <= 0:
                raise ValueError(f"{what}: blocks, unit and block_stride must be positive")
            if v.heads is not None and not 0 <= v.heads.start < v.heads.start + v.heads.count <= v.heads.total:
                raise ValueError(f"{what}: heads {v.heads} are not a range within the total")
            if self.groups[v.group].block_tokens <= 0:
                raise ValueError(f"{what}: block_tokens must be positive")
            extent = v.extent(self.groups[v.group].block_tokens)
            for layer, offset in zip(v.layers, v.offsets, strict=True):
                if not any(
                    s <= offset and offset + extent <= s + r.nbytes
                    for s, r in zip(starts, self.regions, strict=True)
                ):
                    raise ValueError(f"{what}: layer {layer!r} at {offset} (+{extent} bytes) leaves every region")


def flat_starts(regions: tuple[Region, ...]) -> tuple[int, ...]:
    """Flat offset of each region: the running sum of sizes, rounded up to ``GAP``, plus one ``GAP`` between."""
    steps = [-(-r.nbytes // GAP) * GAP + GAP for r in regions]
    return tuple(accumulate([0, *steps[:-1]])) if steps else ()
