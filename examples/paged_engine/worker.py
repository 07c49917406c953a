"""A rank: a transformer with random weights over its heads of a paged cache, and its side of the transfers."""

from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

from kvxfer import Agent, Cache, Config, Rank
from kvxfer.engine import WorkerSide

LAYERS, HEADS, DIM, VOCAB, BLOCK = 2, 4, 16, 128, 4
FACTS = {"model": "random", "seed": "0", "dtype": "float32"}  # what all KV depends on


class Model:
    """``cache`` is [layer, k or v, block, head, token, dim]. What ranks compute is added up in shared memory, ``parts``."""

    def __init__(self, rank: int, tp: int, blocks: int, parts: Any, barrier: Any) -> None:
        self.rank, self.barrier, self.parts = rank, barrier, np.frombuffer(parts).reshape(tp, -1, HEADS * DIM)
        self.first_head, heads = rank * HEADS // tp, HEADS // tp
        rng = np.random.default_rng(0)
        self.embed = rng.normal(size=(VOCAB, HEADS * DIM))
        self.weights = rng.normal(size=(LAYERS, 4, tp, heads, DIM, HEADS * DIM))[:, :, rank] / DIM
        self.cache = np.zeros((LAYERS, 2, blocks, heads, BLOCK, DIM), np.float32)

    def forward(self, tokens: list[int], start: int, table: list[int]) -> int:
        """Compute these tokens, which stand from position ``start`` on; return the one that follows."""
        at = np.arange(start, start + len(tokens))
        x = self.embed[tokens] + np.sin(at[:, None] / (1 + np.arange(HEADS * DIM)))
        for (keys, values), (wq, wk, wv, wo) in zip(self.cache, self.weights, strict=True):
            for plane, w in (keys, wk), (values, wv):
                plane[np.array(table)[at // BLOCK], :, at % BLOCK] = np.einsum("tc,hdc->thd", x, w)
            q, k, v = np.einsum("tc,hdc->htd", x, wq), np.hstack(keys[table]), np.hstack(values[table])
            score = np.where(np.arange(k.shape[1]) <= at[:, None], q @ k.swapaxes(1, 2) / DIM**0.5, -np.inf)
            score = np.exp(score - score.max(-1, keepdims=True))
            self.parts[self.rank, : len(at)] = np.einsum("htd,hdc->tc", score / score.sum(-1, keepdims=True) @ v, wo)
            self.barrier.wait(60)
            x = x + self.parts[:, : len(at)].sum(0)
            self.barrier.wait(60)
        return int(np.argmax(self.embed @ x[-1]))


def run_worker(scheduler: Connection, reports: Connection, rank: int, tp: int, blocks: int, *shared: Any) -> None:
    """Run steps as they come, and report what ends, in steps or between them."""
    model = Model(rank, tp, blocks, *shared)
    planes, heads = {"k": model.cache[:, 0], "v": model.cache[:, 1]}, (model.first_head, HEADS)
    cache = Cache.of_tensors(planes, "layer block head token unit", heads=heads, rank=Rank(tp=rank))
    side = WorkerSide(Agent(cache, Config(), "paged", FACTS), quarantine=blocks // 4)
    while True:
        if report := side.collect():  # the first one says where the agent listens
            reports.send(report)
        if scheduler in wait([scheduler, side]):  # the side polls readable when something has ended
            if (work := scheduler.recv()) is None:
                break
            step, batch = work
            side.begin(step)
            side.load(step)
            sampled = [model.forward(*run) for run in batch]
            side.after_forward(step)
            scheduler.send(sampled)
    side.close()
