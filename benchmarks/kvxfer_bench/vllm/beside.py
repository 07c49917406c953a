"""What loads cost the requests that run beside them: a prefill at the prefill server, decodes at the decode server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from kvxfer_bench.vllm.kinds import SETTLE_S, Params, Prompt, PromptCase, Prompts, first_tokens, offers
from kvxfer_bench.vllm.pairs import ServerPair
from kvxfer_bench.vllm.streams import Others, stream
from kvxfer_vllm.demo.servers import Server

LOADS = 4
"""Loads that follow each other, each begun when the one before has its first token."""
STEPS = 96
"""Tokens by which a decode step is timed."""


class Beside:
    """Times a prefill and decodes with loads of the same pair beside them and without, in turns."""

    def __init__(self, pair: ServerPair, prompts: Prompts, case: PromptCase) -> None:
        self._pair, self._prompts, self._tokens = pair, prompts, case.tokens
        self._taken: dict[str, list[float]] = {}

    def round(self, decoding: Others) -> None:
        """Time each once, beside what decodes all the while. The first round warms up and does not count.

        Raises:
            ServerError: One of the servers failed a request.
        """
        stock = self._stock()
        self._add("prefill_ms", 1e3 * self._prefill(lambda: None))
        self._add("prefill_beside_ms", 1e3 * self._prefill(lambda: self._load(stock)))
        time.sleep(SETTLE_S)
        stock = self._stock()
        begin = time.perf_counter()
        self._load(stock)
        end = time.perf_counter()
        time.sleep(end - begin)  # as long, and nothing is loaded
        calm, busy = (len(decoding.during([span])) for span in ((end, 2 * end - begin), (begin, end)))
        self._add("loads_ms", 1e3 * (end - begin))
        self._add("decoded_tokens_s", calm / (end - begin))
        self._add("decoded_beside_tokens_s", busy / (end - begin))
        self._add("decoded_tokens_lost_a_load", (calm - busy) / LOADS)

    def found(self) -> dict[str, Any]:
        """Return medians of the rounds that count.

        ``prefill_ms`` alone and ``prefill_beside_ms`` while the decode server loads, and their ratio. How many tokens a second the others
        decode while nothing is loaded and while ``LOADS`` loads follow each other, which takes ``loads_ms``, and how many tokens of all of
        them a load costs.
        """
        found = {kind: statistics.median(values[1:]) for kind, values in self._taken.items()}
        return {
            "tokens": self._tokens,
            "loads": LOADS,
            "rounds": len(self._taken["loads_ms"]) - 1,
            **{kind: round(value, 2) for kind, value in found.items()},
            "prefill_beside_to_alone": round(found["prefill_beside_ms"] / found["prefill_ms"], 3),
            "decoded_beside_to_alone": round(found["decoded_beside_tokens_s"] / found["decoded_tokens_s"], 3),
        }

    def _add(self, kind: str, value: float) -> None:
        self._taken.setdefault(kind, []).append(value)

    def _stock(self) -> list[tuple[Prompt, Params]]:
        """Return prompts whose KV the prefill server has ready."""
        some = [self._prompts.of(self._tokens) for _ in range(LOADS)]
        return list(zip(some, offers(self._pair.prefill, some), strict=True))

    def _load(self, stock: list[tuple[Prompt, Params]]) -> None:
        for prompt, params in stock:
            first_tokens(self._pair.decode, [prompt], [params])

    def _prefill(self, beside: Callable[[], None]) -> float:
        """Return the seconds that the prefill server takes for a prompt's first token while ``beside`` runs."""
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(beside)
            begin = time.perf_counter()
            seconds = first_tokens(self._pair.prefill, [self._prompts.of(self._tokens)]) - begin
            other.result()
        return seconds


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
