"""The example of a paged engine with its caches in vaults: ``python paged_on_vault.py BACKEND PREFILL DECODE``.

``PREFILL`` and ``DECODE`` say where each engine's cache is: ``vault``, or ``cpu``.
"""

from __future__ import annotations

import os
import random
import sys
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "examples" / "paged_engine"), str(ROOT / "examples" / "kvxfer-vault")]

import engine  # noqa: E402
import worker  # noqa: E402
from kvxfer_vault.device import Tensor  # noqa: E402

from kvxfer import Agent, Cache, Config, Rank  # noqa: E402
from kvxfer.engine import WorkerSide  # noqa: E402


class VaultModel(worker.Model):
    """A model whose cache is a tensor in a vault for each layer and plane."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        shape = self.cache.shape[2:]
        self.cache = [(Tensor(shape), Tensor(shape)) for _ in range(worker.LAYERS)]

    @property
    def planes(self) -> dict[str, list[Tensor]]:
        return {"k": [k for k, _ in self.cache], "v": [v for _, v in self.cache]}


def run_on_vault(scheduler: Connection, reports: Connection, rank: int, tp: int, blocks: int, *shared: Any) -> None:
    """Run steps as ``worker.run_worker`` does."""
    model = VaultModel(rank, tp, blocks, *shared)
    heads = (model.first_head, worker.HEADS)
    cache = Cache.of_tensors(model.planes, "block head token unit", heads=heads, rank=Rank(tp=rank))
    assert {r.device for r in cache.regions} == {"vault:0"}
    config = Config(backend=os.environ["BACKEND"], integrity="full")
    side = WorkerSide(Agent(cache, config, "paged", worker.FACTS), quarantine=blocks // 4)
    while True:
        if report := side.collect():
            reports.send(report)
        if scheduler in wait([scheduler, side]):
            if (work := scheduler.recv()) is None:
                break
            step, batch = work
            side.begin(step)
            side.load(step)
            sampled = [model.forward(*run) for run in batch]
            side.after_forward(step)
            scheduler.send(sampled)
    side.close()


def run_on_host(*args: Any) -> None:
    """Run steps with the cache in host memory, by the same back end."""
    config = Config(backend=os.environ["BACKEND"], integrity="full")
    worker.Config = lambda: config  # type: ignore[attr-defined, misc, assignment]
    worker.run_worker(*args)


def made(where: str, **sizes: int) -> engine.Engine:
    engine.run_worker = run_on_vault if where == "vault" else run_on_host
    return engine.Engine(**sizes)


if __name__ == "__main__":
    os.environ["BACKEND"], *places = sys.argv[1:]
    rng = random.Random(0)
    prompts = [rng.choices(range(worker.VOCAB), k=rng.randrange(5, 40)) for _ in range(6)]
    alone = made("cpu", tp=1, blocks=400, budget=64)
    prefill, decode = made(places[0], tp=2, blocks=48, budget=16), made(places[1], tp=1, blocks=80, budget=16)
    for i, prompt in enumerate(prompts):
        alone.add(f"r{i}", prompt, 8)
        decode.add(f"r{i}", prompt, 8, ticket=prefill.add(f"r{i}", prompt, 1, offers=True))
    assert engine.run(prefill, decode) == engine.run(alone), "other tokens than one engine alone gives"
    assert decode.counts["loaded"] == len(prompts), decode.counts
    print(len(prompts), "answers are those of one engine alone")
