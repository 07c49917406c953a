"""What a connector costs a server while it moves nothing."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvxfer_bench.vllm.kinds import Prompts
from kvxfer_bench.vllm.pairs import ServerPair
from kvxfer_bench.vllm.streams import stream
from kvxfer_vllm.demo.servers import Server

STEPS = 96
"""Tokens by which a decode step is timed."""


def decode_step(server: Server, others: int, prompts: Prompts) -> float:
    """Return the median milliseconds between the tokens of one of ``others`` requests that decode together.

    Raises:
        ServerError: The server failed one of them.
    """
    with ThreadPoolExecutor(others) as pool:
        streams = [pool.submit(lambda p: list(stream(server, p, STEPS)), prompts.of(16)) for _ in range(others)]
        times = [future.result() for future in streams]
    return 1e3 * statistics.median(float(gap) for each in times for gap in np.diff(each[STEPS // 4 :]))


def idle_cost(pair: ServerPair, plain: Server, prompts: Prompts, rounds: int, others: int = 8) -> dict[str, Any]:
    """Time decode steps with a connector that moves nothing and without a connector, in turns.

    Raises:
        ServerError: One of the servers failed a request.
    """
    servers = {"decode_step": pair.decode, "plain_decode_step": plain}
    taken: dict[str, list[float]] = {name: [] for name in servers}
    for _ in range(rounds + 1):
        for name, server in servers.items():
            taken[name].append(decode_step(server, others, prompts))
    found = {f"{name}_ms": round(statistics.median(ms[1:]), 3) for name, ms in taken.items()}
    return {**found, "decode_step_to_plain": round(found["decode_step_ms"] / found["plain_decode_step_ms"], 3)}
