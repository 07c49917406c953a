"""A worker: one rank of the model, and its side of the transfers."""

from __future__ import annotations

from multiprocessing.connection import Connection, wait
from typing import Any

from model import BLOCK, HEADS, Model

from kvxfer import Agent, Config, Group, Rank
from kvxfer.engine import WorkerSide
from kvxfer.geometry import Cache

FACTS = {"model": "random", "seed": "0", "dtype": "float32"}  # what all KV depends on
GROUP = Group(BLOCK)


# --8<-- [start:cache]
def describe(model: Model) -> Cache:
    """Return what the cache [layer, k or v, block, head, token, dim] is."""
    planes = {name: model.cache[:, p] for p, name in enumerate("kv")}
    heads = model.first_head, HEADS
    return Cache.of_tensors(planes, "layer block head token unit", heads=heads, rank=Rank(tp=model.rank))


# --8<-- [end:cache]
# --8<-- [start:worker]
def run_worker(scheduler: Connection, rank: int, tp: int, blocks: int, *shared: Any) -> None:
    """Run steps as they come, and report what ends between them."""
    model = Model(rank, tp, blocks, *shared)
    side = WorkerSide(Agent(describe(model), Config(), "paged", FACTS), quarantine=blocks // 4)
    while True:
        if scheduler not in wait([scheduler, side]):  # the side polls readable when it has something to report
            scheduler.send((None, side.collect()))
            continue
        work = scheduler.recv()
        if work is None:
            break
        step, batch = work
        side.begin(step)
        side.load(step)
        sampled, payloads = {}, {}
        for request, tokens, start, table, transfer in batch:
            sampled[request] = model.forward(tokens, start, table)
            if transfer is not None:  # its prompt is complete: the first token goes along
                payloads[transfer] = sampled[request].to_bytes(4, "little")
        side.after_forward(step, payloads)
        scheduler.send((sampled, side.collect()))
    side.close()


# --8<-- [end:worker]
