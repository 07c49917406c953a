"""First tokens by kind of request at a pair of servers: the least, computed, cached, loaded, sent to both at once.

In each round the kinds take turns:

* a prompt that is computed where it is decoded;
* the same again, now cached there, which is the least for this prompt;
* a request of two tokens, which is the least that this server needs for a first token. The decode server has rested meanwhile, and what
  has rested, its GPU and its processor, is slow for some milliseconds;
* one whose KV comes from the prefill server;
* one that is sent to both servers at once, unless the connector cannot.
"""

from __future__ import annotations

import re
import statistics
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvxfer.errors import ConfigError
from kvxfer_bench.verdict import estimate
from kvxfer_bench.vllm.pairs import AtOnce, VllmPair
from kvxfer_bench.vllm.streams import stream
from kvxfer_vllm.demo.metrics import loaded_tokens
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Server

SETTLE_S = 0.05
COMPARED, OVER = ("cached", "loaded", "together"), "loaded_over_cached"
"""The kinds of first tokens by which configurations are compared, and the difference of two of them in each round."""

Prompt = list[int]
Params = Mapping[str, Any] | None


@dataclass(frozen=True)
class PromptCase:
    """What is measured: ``at_once`` prompts of ``tokens`` tokens."""

    tokens: int
    at_once: int

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens" if self.at_once == 1 else f"{self.at_once} prompts of {self.tokens} tokens at once"
        )

    @classmethod
    def parse(cls, text: str) -> PromptCase:
        """Read ``1024``, or ``1024x16`` for sixteen at once.

        Raises:
            ConfigError: It is neither.
        """
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
        if match is None:
            raise ConfigError(
                f"--case must be a number of tokens, such as 1024, or 1024x16 for 16 prompts at once, not {text!r}"
            )
        case = cls(int(match[1]), int(match[2] or 1))
        if case.tokens < 16 or case.at_once < 1:
            raise ConfigError(f"--case must have at least 16 tokens and at least one prompt at once, not {text!r}")
        return case


class Prompts:
    """Prompts of token ids that no server has seen, of any number of tokens. Any thread."""

    def __init__(self, vocabulary: int) -> None:
        self._rng, self._lock = np.random.default_rng(time.time_ns()), threading.Lock()
        self._vocabulary = vocabulary

    def of(self, tokens: int) -> Prompt:
        with self._lock:
            return [int(token) for token in self._rng.integers(1, self._vocabulary, tokens)]


class FirstTokens:
    """Times the last first token of requests that are sent together to one pair, kind by kind."""

    def __init__(self, pair: VllmPair, prompts: Prompts, case: PromptCase) -> None:
        self._pair, self._prompts, self._case = pair, prompts, case
        self._taken: dict[str, list[float]] = {}
        self._loads = 0
        self._before = loaded_tokens(pair.decode)

    def round(self) -> None:
        """Time each kind once. The first round warms up and does not count.

        Raises:
            ServerError: One of the servers failed a request.
        """
        pair = self._pair
        self._time("computed", pair.decode, again := self._fresh())
        self._time("cached", pair.decode, again)
        if pair.plain is not None:
            self._time("plain_computed", pair.plain, self._fresh())
            self._time("prefill_computed", pair.prefill, self._fresh())
        some, names = self._fresh(), [uuid.uuid4().hex for _ in range(self._case.at_once)]
        begin = time.perf_counter()
        told = offers(pair.prefill, some, names)
        self._taken.setdefault("prefilled", []).append(time.perf_counter() - begin)
        self._time("least", pair.decode, self._fresh(2))
        self._time("loaded", pair.decode, some, told, names)
        if pair.at_once is not None:
            self._taken.setdefault("together", []).append(_together(pair, pair.at_once, self._fresh()))
            time.sleep(SETTLE_S)
        self._loads += self._case.at_once * (1 + (pair.at_once is not None))

    def found(self) -> dict[str, Any]:
        """Return medians of the rounds that count, in milliseconds.

        ``least``, ``computed``, ``cached`` and ``loaded`` at the decode server; ``prefilled``, until the prefill server had answered;
        ``together``, from the dispatch to both servers to the decode server's first token, where one after the other takes ``prefilled``
        and ``loaded``. ``plain_computed`` and ``prefill_computed`` compare a first token computed without a connector and with one.
        ``tokens_loaded``: of the tokens that were to be loaded, the share that came. ``intervals_ms``: of each
        of ``COMPARED`` (``kvxfer_bench.verdict``).
        """
        found = {kind: statistics.median(seconds[1:]) for kind, seconds in self._taken.items()}
        intervals = {kind: estimate(ms).interval(2) for kind, ms in self.compared().items()}
        tokens = loaded_tokens(self._pair.decode) - self._before
        return {
            "tokens": self._case.tokens,
            "at_once": self._case.at_once,
            "rounds": len(self._taken["loaded"]) - 1,
            **{f"{kind}_ms": round(1e3 * seconds, 2) for kind, seconds in found.items()},
            "loaded_over_least_ms": round(1e3 * (found["loaded"] - found["least"]), 2),
            "loaded_over_cached_ms": round(1e3 * (found["loaded"] - found["cached"]), 2),
            "loaded_to_least": round(found["loaded"] / found["least"], 3),
            "loaded_to_computed": round(found["loaded"] / found["computed"], 3),
            "tokens_loaded": round(tokens / (self._loads * self._case.tokens), 4),
            "intervals_ms": {kind: interval for kind, interval in intervals.items() if interval},
        }

    def compared(self) -> dict[str, list[float]]:
        """Return the milliseconds of the rounds that count, of each of ``COMPARED`` that was timed."""
        found = {kind: [1e3 * s for s in self._taken[kind][1:]] for kind in COMPARED if kind in self._taken}
        return found | {OVER: [b - a for a, b in zip(found["cached"], found["loaded"], strict=True)]}

    def _fresh(self, length: int | None = None) -> list[Prompt]:
        return [self._prompts.of(length or self._case.tokens) for _ in range(self._case.at_once)]

    def _time(
        self,
        kind: str,
        server: Server,
        some: Sequence[Prompt],
        told: Sequence[Params] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        begin = time.perf_counter()
        end = first_tokens(server, some, told, names)
        self._taken.setdefault(kind, []).append(end - begin)
        time.sleep(SETTLE_S)


def first_tokens(
    server: Server, some: Sequence[Prompt], told: Sequence[Params] | None = None, names: Sequence[str] | None = None
) -> float:
    """Send all at once, each with its ``kv_transfer_params``; return when the last had its first token, by ``time.perf_counter``.

    ``names``: their ``X-Request-Id``.

    Raises:
        ServerError: It failed one of them.
    """
    none = [None] * len(some)
    with ThreadPoolExecutor(len(some)) as pool:
        firsts = pool.map(lambda *one: next(stream(server, one[0], 1, *one[1:])), some, told or none, names or none)
        return max(firsts)


def offers(server: Server, some: Sequence[Prompt], names: Sequence[str] | None = None) -> list[Params]:
    """Have a prefill server compute all at once; return what it says of the KV of each.

    ``names``: their ``X-Request-Id``, by which vLLM's push connector knows them again at the decode server.

    Raises:
        ServerError: It failed one of them.
    """
    with ThreadPoolExecutor(len(some)) as pool:
        told = pool.map(
            lambda prompt, name: complete(server, prompt, 1, PREFILL_PARAMS, name=name).kv_transfer_params,
            some,
            names or [None] * len(some),
        )
        return list(told)


def _together(pair: VllmPair, at_once: AtOnce, some: Sequence[Prompt]) -> float:
    """Send each to both servers at the same time; return seconds until the last first token at the decode server."""
    names = [uuid.uuid4().hex for _ in some]
    told = [at_once(name) for name in names]
    begin = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(first_tokens, pair.prefill, some, [there for there, _ in told], names)
        end = first_tokens(pair.decode, some, [here for _, here in told], names)
        prefill.result()
    return end - begin
