"""The memory of a simulated engine, and what each byte of it ought to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvxfer.geometry import Cache
from kvxfer.values import Group, Rank

Content = Callable[[bytes, int], np.ndarray]
"""The KV of a prompt, ``[token, layer, head, unit]``, by its digest and length."""

_AXES = ("layer", "block", "token", "head", "unit")


class PagedMemory:
    """The caches of an engine's ranks, each of which has its share of the heads, and what each byte of them ought to be.

    Args:
        dims: Order of the axes ``layer``, ``block``, ``token``, ``head`` and ``unit`` in memory.
        seed: What the memory holds at first; ``None``: zeros.
        content: What the KV of a prompt is, by its digest and length: an array ``[token, layer, head, unit]``, whose first tokens are
            the same however many there are. ``None``: bytes drawn from the digest.
        group: How blocks are grouped; ``None``: full attention with ``tokens`` tokens a block.
        described: The axes as the cache is described to others; ``None``: as ``dims`` has them.

    Attributes:
        arrays: Memory of each rank, with the axes of ``dims``.
        caches: Descriptions of the arrays.
    """

    def __init__(
        self,
        *,
        layers: int = 3,
        blocks: int = 16,
        tokens: int = 4,
        heads: int = 4,
        unit: int = 16,
        ranks: int = 1,
        dims: str = "layer block head token unit",
        seed: int | None = None,
        content: Content | None = None,
        group: Group | None = None,
        described: str | None = None,
    ) -> None:
        self.layers, self.blocks, self.tokens, self.heads, self.unit = layers, blocks, tokens, heads, unit
        sizes = {"layer": layers, "block": blocks, "token": tokens, "head": heads // ranks, "unit": unit}
        shape, rng = [sizes[axis] for axis in dims.split()], np.random.default_rng(seed)
        self.arrays = [
            np.zeros(shape, np.uint8) if seed is None else rng.integers(1, 255, shape, np.uint8) for _ in range(ranks)
        ]
        self.caches = [
            Cache.of_tensors(
                array,
                described or dims,
                encoding="test",
                layers=[f"layer.{i}" for i in range(layers)],
                heads=None if "head" not in (described or dims) else (rank * heads // ranks, heads),
                group=group or Group(tokens),
                rank=Rank(0, rank),
            )
            for rank, array in enumerate(self.arrays)
        ]
        self._axes = [dims.split().index(axis) for axis in _AXES]
        self._content = content or self._drawn
        self._wanted = np.zeros((layers, blocks, tokens, heads, unit), np.uint8) if seed is None else self.read()

    def read(self, blocks: Sequence[int] | None = None) -> np.ndarray:
        """Return a copy of what blocks hold, or all of them, with the heads of all ranks: ``[layer, block, token, head, unit]``."""
        parts = [array.transpose(self._axes) for array in self.arrays]
        return np.concatenate([part if blocks is None else part[:, blocks] for part in parts], axis=3)

    def write(self, blocks: Sequence[int], values: Any) -> None:
        """Set what blocks hold to ``[layer, block, token, head, unit]``, or to what numpy makes that from."""
        self._wanted[:, blocks] = values
        self._put((slice(None), blocks))

    def content(self, digest: bytes, tokens: int) -> np.ndarray:
        """Return the KV of a prompt, ``[token, layer, head, unit]``."""
        return self._content(digest, tokens)

    def compute(self, digest: bytes, blocks: Sequence[int], start: int, end: int, layer: int | None = None) -> None:
        """Write a prompt's KV of the tokens ``[start, end)`` into its blocks, of all layers or of one."""
        self._put(self.expect(digest, blocks, start, end, layer))

    def expect(
        self, digest: bytes, blocks: Sequence[int], start: int, end: int, layer: int | None = None
    ) -> tuple[Any, ...]:
        """Have ``verify`` look for this instead, where other code has written it; return where that is."""
        which = slice(None) if layer is None else slice(layer, layer + 1)
        at = np.arange(start, end)
        cells = which, np.asarray(blocks, np.int64)[at // self.tokens], at % self.tokens
        self._wanted[cells] = self.content(digest, end)[start:, which].swapaxes(0, 1)
        return cells

    def accept(self, blocks: Sequence[int] | None = None) -> None:
        """Have ``verify`` look for what blocks, or all of them, hold now: it must not change any more."""
        which = slice(None) if blocks is None else blocks
        self._wanted[:, which] = self.read()[:, which]

    def scramble(self, seed: int = 0) -> None:
        """Overwrite all blocks with other bytes."""
        self.write(range(self.blocks), np.random.default_rng(seed).integers(1, 255, self._wanted.shape, np.uint8))

    def verify(self, *, but: Sequence[int] = ()) -> None:
        """Compare every byte with what ought to be there, those included that nobody may have touched.

        Args:
            but: Blocks to leave out, because they are being written.

        Raises:
            AssertionError: A byte is wrong.
        """
        wrong = self.read() != self._wanted
        wrong[:, list(but)] = False
        if wrong.any():
            layer, block, token, head, _ = np.argwhere(wrong)[0].tolist()
            raise AssertionError(
                f"{np.count_nonzero(wrong)} bytes are wrong, the first of them in layer {layer}, block {block}, token {token} "
                f"of it, head {head}"
            )

    def _put(self, cells: tuple[Any, ...]) -> None:
        """Write what is wanted of these cells, and of no others."""
        for array, part in zip(self.arrays, np.split(self._wanted, len(self.arrays), axis=3), strict=True):
            array.transpose(self._axes)[cells] = part[cells]

    def _drawn(self, digest: bytes, tokens: int) -> np.ndarray:
        shape = (tokens, self.layers, self.heads, self.unit)
        return np.random.default_rng(list(digest)).integers(1, 255, shape, np.uint8)
