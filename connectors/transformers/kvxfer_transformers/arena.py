"""Memory that stays in place, in blocks of tokens, into and out of which ``generate()`` caches are copied.

A ``DynamicCache`` is new memory at each token, a row of a batch is not contiguous, and peers read blocks. So each row that is
offered or fetched has blocks here, for as long as a transfer may touch them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvxfer.geometry import Cache, Heads, Region, View
from kvxfer.geometry.region import flat_starts
from kvxfer.values import NULL, BlockTable, Group
from kvxfer_transformers.layers import LayerForm

__all__ = ["BLOCK", "Arena"]

BLOCK = 16
"""Tokens in a block."""


@dataclass(frozen=True)
class _Plane:
    """The keys or values of all layers of one form, as [layer, block, token, head, dim]."""

    name: str
    group: int
    forms: tuple[LayerForm, ...]
    memory: torch.Tensor


class Arena:
    """Blocks for all layers, with room for ``tokens`` tokens. One thread at a time.

    ``groups`` has a group for each kind of layer, in the order of the model; ``cache`` describes the memory to peers.
    """

    def __init__(self, forms: tuple[LayerForm, ...], tokens: int, device: torch.device) -> None:
        self.forms, self.device = forms, device
        self._blocks = -(-tokens // BLOCK)
        self._free = list(range(self._blocks))[::-1]
        windows = list(dict.fromkeys(form.window for form in forms))
        self.groups = tuple(Group(BLOCK, "window", window) if window else Group(BLOCK) for window in windows)
        alike: dict[tuple[object, ...], list[LayerForm]] = {}
        for form in forms:
            alike.setdefault((form.window, form.heads, form.dims, form.dtype), []).append(form)
        self._planes = tuple(
            _Plane(name, windows.index(same[0].window), tuple(same), self._allocate(same, side))
            for same in alike.values()
            for side, name in enumerate(("k", "v"))
        )
        self.cache = self._describe()
        self.cache.check()

    def _allocate(self, same: list[LayerForm], side: int) -> torch.Tensor:
        form = same[0]
        shape = (len(same), self._blocks, BLOCK, form.heads[side], form.dims[side])
        return torch.empty(shape, dtype=form.dtype, device=self.device)

    def _describe(self) -> Cache:
        regions = tuple(Region.of(plane.memory) for plane in self._planes)
        views = []
        for plane, start in zip(self._planes, flat_starts(regions), strict=True):
            layer, block, token, head, dim = plane.memory.shape
            nbytes = plane.memory.element_size()
            views.append(
                View(
                    plane=plane.name,
                    group=plane.group,
                    layers=tuple(str(form.index) for form in plane.forms),
                    offsets=tuple(start + i * plane.memory.stride(0) * nbytes for i in range(layer)),
                    blocks=block,
                    block_stride=token * head * dim * nbytes,
                    unit=dim * nbytes,
                    encoding=str(plane.memory.dtype).removeprefix("torch."),
                    heads=Heads(0, head, head, dim * nbytes),
                    token_stride=head * dim * nbytes,
                )
            )
        return Cache(regions, self.groups, tuple(views))

    def room(self) -> int:
        """Return how many blocks are free."""
        return len(self._free)

    def take(self, tokens: int) -> list[int] | None:
        """Take blocks for this number of tokens; return ``None`` if too few are free."""
        count = -(-tokens // BLOCK)
        if count > len(self._free):
            return None
        taken, self._free = self._free[len(self._free) - count :], self._free[: len(self._free) - count]
        return taken[::-1]

    def give_back(self, blocks: list[int]) -> None:
        """Return blocks that nothing touches any more."""
        self._free.extend(reversed(blocks))

    def table(self, blocks: list[int], tokens: int) -> BlockTable:
        """Return the block table of a row with this number of tokens; for windows, only the blocks that the next token attends to."""
        rows = []
        for group in self.groups:
            first = group.behind(tokens) // BLOCK
            rows.append([NULL] * first + blocks[first:])
        return BlockTable.of(rows)

    def store(self, index: int, side: int, blocks: list[int], past: int, content: torch.Tensor) -> None:
        """Copy the keys (``side`` 0) or values (1) of a layer, [head, token, dim], into its blocks as the tokens up to ``past``."""
        memory, at = self._place(index, side, blocks, past - content.shape[1], past)
        memory[at] = content.transpose(0, 1).to(memory.device)

    def load(self, index: int, side: int, blocks: list[int], first: int, past: int) -> torch.Tensor:
        """Return the keys or values of a layer for the tokens ``[first, past)`` as [head, token, dim]."""
        memory, at = self._place(index, side, blocks, first, past)
        return memory[at].transpose(0, 1)

    def _place(
        self, index: int, side: int, blocks: list[int], first: int, past: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's memory as [slot, head, dim], and the slots of the tokens ``[first, past)``."""
        for plane in self._planes[side::2]:
            for layer, form in enumerate(plane.forms):
                if form.index == index:
                    tokens = torch.arange(first, past)
                    slots = torch.tensor(blocks)[tokens // BLOCK] * BLOCK + tokens % BLOCK
                    return plane.memory[layer].flatten(0, 1), slots.to(self.device)
        raise KeyError(f"no layer {index}")
