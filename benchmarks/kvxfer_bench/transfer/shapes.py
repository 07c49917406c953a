"""Caches with the shapes of known models, filled with words that show where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvxfer.block_table import Ints
from kvxfer.errors import ConfigError
from kvxfer.geometry import Cache, Rank
from kvxfer.memory import devices_of

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
    """A prompt in scattered blocks, with ids ``src`` on the producer and ``dst`` on the consumer, each out of ``blocks`` blocks."""

    def __init__(self, model: Model, tokens: int) -> None:
        need = model.prompt_blocks(tokens)
        self.blocks = model.cache_blocks(tokens)
        self.nbytes = need * model.page * model.layers
        rng = np.random.default_rng(0)
        self.src, self.dst = (rng.permutation(self.blocks)[:need].astype(np.int64) for _ in range(2))

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
    """A cache of ``blocks`` blocks on ``device`` in one allocation, with token-major blocks, seen as words of eight bytes.

    ``tp``: which of how many ranks it belongs to, each with the model's heads. One thread writes and reads it with these methods;
    what they write is there when they return.
    """

    def __init__(self, model: Model, blocks: int, device: str = "cpu", tp: tuple[int, int] = (0, 1)) -> None:
        self.model, self.blocks, self.device = model, blocks, device
        outer = {"layer": model.layers, "block": blocks}
        if model.outermost == "blocks":
            outer = dict(reversed(outer.items()))
        sizes = outer | {"token": model.block_tokens, "head": model.heads, "unit": model.head_bytes // 8}
        if model.heads * tp[1] == 1:
            del sizes["head"]
        self._xp: Any = np
        if device != "cpu":
            import torch

            self._xp = torch
            torch.cuda.set_device(device)
        self._on = {} if device == "cpu" else {"device": device}
        self.words: Any = self._xp.zeros(tuple(sizes.values()), dtype=self._xp.int64, **self._on)
        heads = (tp[0] * model.heads, tp[1] * model.heads) if "head" in sizes else None
        dims = " ".join(sizes)
        self.cache = Cache.of_tensors(self.words, dims, encoding="bench", heads=heads, rank=Rank(tp=tp[0]))
        self._by_layer = self.words if model.outermost == "layers" else self.words.swapaxes(0, 1)

    def fill(self) -> None:
        """Set word i to i times a constant."""
        flat = self.words.reshape(-1)
        flat[:] = self._xp.arange(len(flat), **self._on)
        flat *= _GOLDEN
        self._settle()

    def clear(self) -> None:
        """Set every word to zero."""
        self.words[:] = 0
        self._settle()

    def put(self, blocks: Sequence[int], values: NDArray[np.int64] | int) -> None:
        """Write ``[layer, len(blocks), token, head, word]``, or one value everywhere."""
        self._by_layer[:, self._there(blocks)] = values if isinstance(values, int) else self._there(values)
        self._settle()

    def get(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """Return a copy of what blocks hold, ``[layer, len(blocks), token, head, word]``."""
        found = self._by_layer[:, self._there(blocks)]
        return found if self._xp is np else np.asarray(found.cpu().numpy())

    def matches(self, mine: Ints, theirs: Ints) -> bool:
        """Return whether our blocks ``mine`` hold, bit for bit, what ``fill`` wrote to the blocks ``theirs`` of such a pool."""
        page, layers = self.model.page // 8, self.model.layers
        for layer in range(layers):
            first = layer * self.blocks + theirs if self.model.outermost == "layers" else theirs * layers + layer
            want = self._there(first * page)[:, None] + self._there(np.arange(page))
            if not bool((self._by_layer[layer][self._there(mine)].reshape(-1, page) == want * _GOLDEN).all()):
                return False
        return True

    def _there(self, values: Any) -> Any:
        return np.asarray(values) if self._xp is np else self._xp.as_tensor(values, **self._on)

    def _settle(self) -> None:
        if self._xp is not np:
            self._xp.cuda.synchronize(self.device)


def cache_devices(device: str) -> tuple[str, str]:
    """Return the devices of the two caches for a kind of device: two devices, or one for both if there is only one.

    Raises:
        ConfigError: No such device is here.
    """
    here = devices_of(device)
    if not here:
        raise ConfigError(f"--device {device}: no device of kind {device!r} is here")
    return here[0], here[min(1, len(here) - 1)]
