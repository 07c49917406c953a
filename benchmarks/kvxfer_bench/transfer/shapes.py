"""Caches with the shapes of known models, filled with words that show where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvxfer.block_table import Ints
from kvxfer.geometry import Cache, Group, Heads, Region, View

Memory = Literal["plain", "declared", "elastic"]
"""Kind of a cache's memory. ``plain``; ``declared``, which is the same but declared to be elastic, so that it is moved like elastic memory;
or ``elastic``, which on a GPU is mapped by pages and in host memory is like ``declared``."""

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64: makes the words of consecutive indices unlike


@dataclass(frozen=True)
class Model:
    """One rank's share of a model's cache."""

    layers: int
    heads: int
    head_bytes: int  # the size of one head of one token, K and V together
    block_tokens: int
    # whether all blocks of a layer lie side by side, or all layers of a block
    outermost: Literal["layers", "blocks"] = "layers"

    @property
    def page(self) -> int:
        """Bytes of one block of one layer."""
        return self.heads * self.head_bytes * self.block_tokens

    def prompt_blocks(self, tokens: int) -> int:
        """Return how many blocks a prompt of ``tokens`` tokens fills."""
        return -(-tokens // self.block_tokens)

    def cache_blocks(self, tokens: int) -> int:
        """Return how many blocks a cache has in which such a prompt lies scattered: a quarter more."""
        need = self.prompt_blocks(tokens)
        return need + need // 4 + 1


class Request:
    """A prompt in scattered blocks, with ids ``src`` on the producer and ``dst`` on the consumer, each out of ``blocks`` blocks.

    It may be one of ``count`` prompts in the same caches, which have no block in common.
    """

    def __init__(self, model: Model, tokens: int, number: int = 0, count: int = 1) -> None:
        need = model.prompt_blocks(tokens)
        self.blocks = model.cache_blocks(need * model.block_tokens * count)
        self.nbytes = need * model.page * model.layers
        rng, mine = np.random.default_rng(0), slice(number * need, (number + 1) * need)
        self.src, self.dst = (rng.permutation(self.blocks)[mine].astype(np.int64) for _ in range(2))

    def __len__(self) -> int:
        """Return how many blocks it fills."""
        return len(self.src)


MODELS = {
    # K|V packed, bf16, head size 128; DeepSeek's latent is 512 + 64 values without heads.
    "llama-3-8b": Model(32, 8, 512, 16),
    "llama-3-8b-blocks": Model(32, 8, 512, 16, "blocks"),  # the same with blocks outermost: rows of 2 MiB
    "llama-3-70b-tp4": Model(80, 2, 512, 16),
    "deepseek-mla": Model(61, 1, 1152, 64),
    "pages-of-16k": Model(1, 1, 1024, 16),  # not a model: pages for comparing transports
    "pages-of-1k": Model(64, 1, 64, 16),  # not a model either: pages so short that every back end packs them
}


class Pool:
    """A cache of ``blocks`` blocks on ``device`` in one allocation, with token-major blocks."""

    def __init__(self, model: Model, blocks: int, device: str, memory: Memory = "plain") -> None:
        self.model, self.blocks, self.device = model, blocks, device
        self.nbytes = model.layers * blocks * model.page
        self._torch: Any = None
        if device == "cpu":
            self.words: Any = np.zeros(self.nbytes // 8, np.int64)
            address = self.words.ctypes.data
        else:
            import torch

            self._torch = torch
            torch.cuda.set_device(device)
            if memory == "elastic":
                torch.cuda.memory._set_allocator_settings("expandable_segments:True")
            self.words = torch.zeros(self.nbytes // 8, dtype=torch.int64, device=device)
            address = self.words.data_ptr()
        self.cache = self._describe(Region(address, self.nbytes, device, memory != "plain"))

    def _describe(self, region: Region) -> Cache:
        m = self.model
        by_layer, by_block = self._strides()
        offsets = tuple(i * by_layer * m.page for i in range(m.layers))
        layers = tuple(f"layer.{i}" for i in range(m.layers))
        heads = Heads(0, m.heads, m.heads, m.head_bytes) if m.heads > 1 else None
        block, token = by_block * m.page, m.heads * m.head_bytes
        view = View("kv", 0, layers, offsets, self.blocks, block, m.head_bytes, "bench", heads, token)
        return Cache((region,), (Group(m.block_tokens),), (view,))

    def _strides(self) -> tuple[int, int]:
        """Return how many pages lie from one layer to the next, and from one block to the next."""
        return (self.blocks, 1) if self.model.outermost == "layers" else (1, self.model.layers)

    def fill(self) -> None:
        """Set word i to i times a constant."""
        if self._torch is None:
            np.multiply(np.arange(len(self.words), dtype=np.int64), _GOLDEN, out=self.words)
        else:
            self.words.copy_(self._torch.arange(len(self.words), device=self.device) * _GOLDEN)
            self._torch.cuda.synchronize()

    def clear(self) -> None:
        """Set every word to zero."""
        self.words[:] = 0
        if self._torch is not None:
            self._torch.cuda.synchronize()

    def matches(self, mine: Ints, theirs: Ints) -> bool:
        """Return whether our blocks ``mine`` hold, bit for bit, what ``fill`` wrote to the blocks ``theirs`` of such a pool."""
        xp: Any = self._torch if self._torch is not None else np
        per_page = self.model.page // 8
        by_layer, by_block = self._strides()
        pages = self.words.reshape(-1, per_page)
        word = xp.arange(per_page) if self._torch is None else xp.arange(per_page, device=self.device)
        at_mine, first = self._put(mine * by_block), self._put(theirs * by_block * per_page)[:, None]
        for layer in range(self.model.layers):
            want = (first + word[None, :] + layer * by_layer * per_page) * _GOLDEN
            if not bool((pages[at_mine + layer * by_layer] == want).all()):
                return False
        return True

    def _put(self, values: Ints) -> Any:
        return values if self._torch is None else self._torch.as_tensor(values, device=self.device)
