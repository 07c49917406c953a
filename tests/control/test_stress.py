"""Many transfers at once between many processes, one of which is killed: none hangs, none delivers wrong bytes, and all
end in time. ``KVXFER_STRESS=full`` runs a thousand between twenty; by default it is smaller, for every day."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvxfer.protocol.values import Ended, Released
from tests.control.caches import HEADS, LAYERS, TOKENS, UNIT
from tests.control.node import Node, name

# Producers, as many consumers, and transfers between each two.
ENGINES, EACH = (10, 10) if os.environ.get("KVXFER_STRESS") == "full" else (4, 10)
COUNT = ENGINES * EACH  # of one engine
DEADLINE = 30.0
TIMES = {"transfer_timeout": DEADLINE, "lease": DEADLINE, "peer_timeout": 5.0}
BLOCKS = 2 * COUNT


def memory(seed: int) -> np.ndarray:
    """What a node with this seed holds, ``[layers, blocks, bytes]``."""
    size = len(LAYERS) * BLOCKS * HEADS * TOKENS * UNIT
    return np.random.default_rng(seed).integers(1, 255, size, dtype=np.uint8).reshape(len(LAYERS), BLOCKS, -1)


def blocks(other: int, i: int) -> list[int]:
    """The two blocks that transfer ``i`` with the ``other`` node uses on this side."""
    first = 2 * (other * EACH + i)
    return [first, first + 1]


@pytest.mark.slow
def test_one_of_many_processes_dies() -> None:
    with ThreadPoolExecutor(2 * ENGINES) as pool:
        seeds = [*range(1, ENGINES + 1)] + [0] * ENGINES
        nodes = list(pool.map(lambda seed: Node(seed=seed, blocks=BLOCKS, **TIMES), seeds))
        try:
            run(pool, nodes[:ENGINES], nodes[ENGINES:])
        finally:
            for n in nodes:
                n.end()


def run(pool: ThreadPoolExecutor, producers: list[Node], consumers: list[Node]) -> None:
    """Each node is spoken to by one thread at a time."""
    every = range(ENGINES)
    names = {(p, c, i): name(f"{p}-{c}-{i}") for p in every for c in every for i in range(EACH)}
    wanted, half = threading.Barrier(2 * ENGINES), threading.Barrier(ENGINES)

    def want(c: int) -> None:
        asked = [(p, i) for i in range(EACH) for p in every]
        consumers[c].several(
            [("fetch", names[p, c, i], producers[p].source, blocks(p, i), 2 * TOKENS) for p, i in asked]
        )
        wanted.wait(60)

    def have(p: int) -> None:
        """One block of each, once all are wanted; when that is done everywhere, the other. The first producer dies."""
        wanted.wait(60)
        mine = [(c, i) for i in range(EACH) for c in every]
        producers[p].several([("offer", names[p, c, i], blocks(c, i)[:1], TOKENS, 1, False) for c, i in mine])
        half.wait(60)
        if p == 0:
            del mine[COUNT // 2 :]
        producers[p].several([("offer", names[p, c, i], blocks(c, i), 2 * TOKENS, 1, True) for c, i in mine])
        if p == 0:
            producers[p].kill()

    begun = time.monotonic()
    for job in [pool.submit(want, c) for c in every] + [pool.submit(have, p) for p in every]:
        job.result(120)
    list(pool.map(lambda c: c.wait(Released, count=COUNT, timeout=DEADLINE + 60), consumers))
    took = time.monotonic() - begun
    kinds: Counter[tuple[bool, bool]] = Counter()
    held, longest = [memory(p + 1) for p in every], 0.0
    for c, consumer in enumerate(consumers):
        ended = [e for e in consumer.seen if isinstance(e, Ended)]
        ends = {e.transfer: e for e in ended}
        assert len(ends) == len(ended) == COUNT
        got = np.frombuffer(consumer.blocks(list(range(BLOCKS))), np.uint8).reshape(len(LAYERS), BLOCKS, -1)
        for p in every:
            for i in range(EACH):
                end = ends[names[p, c, i]]
                longest = max(longest, end.seconds)
                assert end.seconds <= DEADLINE + 10, end
                kinds[p == 0, end.outcome.delivered] += 1
                if end.outcome.delivered:
                    assert np.array_equal(got[:, blocks(p, i)], held[p][:, blocks(c, i)]), end
    assert kinds[False, True] == (ENGINES - 1) * COUNT, kinds
    assert kinds[True, False] > 0, kinds
    for producer in producers[1:]:
        producer.wait(Released, count=COUNT, timeout=DEADLINE + 60)
        assert all(e.outcome.delivered for e in producer.seen if isinstance(e, Ended))
    print(
        f"{len(names)} transfers, {2 * ENGINES} processes, {took:.1f} s, longest {longest:.1f} s: "
        + ", ".join(
            f"{n} {'delivered' if good else 'failed'}{' (from the killed one)' if dead else ''}"
            for (dead, good), n in sorted(kinds.items())
        )
    )
