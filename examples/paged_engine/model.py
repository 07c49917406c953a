"""A transformer with random weights over a paged cache: one tensor-parallel rank's heads of it."""

from __future__ import annotations

from typing import Any

import numpy as np

LAYERS, HEADS, DIM, VOCAB, BLOCK = 2, 4, 16, 128, 4


class Model:
    """``cache`` is [layer, k or v, block, head, token, dim], float32. Ranks add up what they compute in shared memory."""

    def __init__(self, rank: int, tp: int, blocks: int, total: Any, barrier: Any) -> None:
        heads = HEADS // tp
        self.rank, self.barrier, self.first_head, self.heads = rank, barrier, rank * heads, heads
        self.total = np.frombuffer(total).reshape(tp, -1)  # one row a rank
        rng = np.random.default_rng(0)
        self.embed = rng.normal(size=(VOCAB, HEADS * DIM))
        weights = rng.normal(size=(LAYERS, 4, HEADS, DIM, HEADS * DIM)) / DIM
        self.weights = weights[:, :, self.first_head : self.first_head + heads]
        self.cache = np.zeros((LAYERS, 2, blocks, heads, BLOCK, DIM), np.float32)

    def forward(self, tokens: list[int], start: int, table: list[int]) -> int:
        """Compute these tokens, which stand from position ``start`` on; return the one that follows."""
        at = np.arange(start, start + len(tokens))
        block, slot = np.array(table)[at // BLOCK], at % BLOCK
        x = self.embed[tokens] + np.sin(at[:, None] / (1 + np.arange(HEADS * DIM)))
        for layer, (wq, wk, wv, wo) in zip(self.cache, self.weights, strict=True):
            q = np.einsum("tc,hdc->htd", x, wq)
            for plane, w in zip(layer, (wk, wv), strict=True):
                plane[block, :, slot] = np.einsum("tc,hdc->thd", x, w)
            k, v = (plane[table].swapaxes(0, 1).reshape(self.heads, -1, DIM) for plane in layer)
            score = np.where(np.arange(k.shape[1]) <= at[:, None], q @ k.swapaxes(1, 2) / DIM**0.5, -np.inf)
            score = np.exp(score - score.max(-1, keepdims=True))
            x = x + self.all_reduce(np.einsum("htd,hdc->tc", score / score.sum(-1, keepdims=True) @ v, wo))
        return int(np.argmax(self.embed @ x[-1]))

    def all_reduce(self, part: Any) -> Any:
        self.total[self.rank, : part.size] = part.ravel()
        self.barrier.wait(60)
        out = self.total[:, : part.size].sum(0).reshape(part.shape)
        self.barrier.wait(60)
        return out
