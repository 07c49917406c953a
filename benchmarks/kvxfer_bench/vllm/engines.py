"""``kvxfer bench engines``: time to first token on real vLLM servers with a model of realistic size, back ends in turns.

For each back end, a prefill and a decode server run on the given GPUs, with dummy weights. All pairs run at the same time but only one
is asked at a time, in a random order in each round, so that other load on the machine affects all of them alike. An additional server
without a connector shows what a connector costs while nothing moves.

The first configuration is compared with each of the others: a verdict for each case, such as "12.0 ms slower, interval 8.1 to 16.3". With
``--pairs-alike`` it is also compared with itself, which shows what chance does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated

import numpy as np
import typer

from kvxfer.cli.terminal import Say, progress
from kvxfer_bench.options import STOCK, Gpus, KeepLogs, Rounds, parsed
from kvxfer_bench.servers import START_S, PairTurns, Tell, shape_of, starting
from kvxfer_bench.verdict import compare
from kvxfer_bench.vllm.kinds import FirstTokens, PromptCase, Prompts
from kvxfer_bench.vllm.pairs import VllmPair, started
from kvxfer_bench.vllm.streams import stream
from kvxfer_vllm.demo.model import SHAPES, Shape
from kvxfer_vllm.demo.routing import complete
from kvxfer_vllm.demo.servers import Server, await_ready

OTHERS, OTHERS_TOKENS = 8, 1024
"""Requests that decode meanwhile, and the tokens that each decodes before another takes its place."""
STEPS = 96
"""Tokens by which a decode step is timed."""
CASES = ["1024", "8192", "32768", "1024x16"]

COMPARED = (
    """Back ends to compare, with settings if wanted, such as 'nixl:{"blocks_outermost": false}'; """
    f"{' and '.join(STOCK)} are vLLM's own connectors."
)


class EngineTurns(PairTurns[VllmPair]):
    """Measures pairs of servers, by back end, in turns; one more round than ``rounds`` warms up."""

    def __init__(self, pairs: Mapping[str, VllmPair], prompts: Prompts, rounds: int, tell: Tell, say: Say) -> None:
        super().__init__(pairs, tell, say)
        self._prompts, self._rounds, self._first = prompts, rounds, next(iter(pairs))

    def first_tokens(self, case: PromptCase) -> None:
        """Tell first tokens by kind, and how the first pair compares with each of the others."""
        timed = {name: FirstTokens(pair, self._prompts, case) for name, pair in self.pairs.items()}
        self.rounds(f"time to first token, {case}", self._rounds, lambda name, pair, number: timed[name].round())
        self.each("figures", lambda name, pair: self.tell({"backend": name, **timed[name].found()}))
        taken = {name: timed[name].compared() for name in self.pairs}
        for name in [name for name in taken if self._first in taken and name != self._first]:
            for kind in [kind for kind in taken[self._first] if kind in taken[name]]:
                found = compare(taken[self._first][kind], taken[name][kind])
                sure = {"interval_ms": interval} if (interval := found.interval(2)) else {}
                row = {"compared": name, "with": self._first, **asdict(case), "kind": kind}
                self.tell({**row, "slower_ms": round(found.median, 2), **sure, "verdict": found.words})

    def idle(self) -> None:
        """Tell what an idle connector costs a decode step, of pairs beside a server without a connector."""

        def one(name: str, pair: VllmPair) -> None:
            if pair.plain is not None:
                servers = {"decode_step": pair.decode, "plain_decode_step": pair.plain}
                taken: dict[str, list[float]] = {name: [] for name in servers}
                for _ in range(self._rounds + 1):
                    for step, server in servers.items():
                        taken[step].append(decode_step(server, self._prompts))
                found = {f"{step}_ms": round(statistics.median(ms[1:]), 3) for step, ms in taken.items()}
                ratio = round(found["decode_step_ms"] / found["plain_decode_step_ms"], 3)
                self.tell({"backend": name, "others": OTHERS, **found, "decode_step_to_plain": ratio})

        self.each("decode steps", one)


def decode_step(server: Server, prompts: Prompts) -> float:
    """Return the median milliseconds between the tokens of one of ``OTHERS`` requests that decode together.

    Raises:
        ServerError: The server failed one of them.
    """
    with ThreadPoolExecutor(OTHERS) as pool:
        times = list(pool.map(lambda _: list(stream(server, prompts.of(16), STEPS)), range(OTHERS)))
    return 1e3 * statistics.median(float(gap) for each in times for gap in np.diff(each[STEPS // 4 :]))


def scatter(pair: VllmPair, prompts: Prompts, tokens: int) -> None:
    """Use both caches of a pair as hours of serving would, so that what comes next gets blocks from everywhere.

    Requests of mixed lengths, ``tokens`` tokens in all, end in another order than they began.

    Raises:
        ServerError: One of them failed a request.
    """
    lengths = [int(n) for n in np.random.default_rng(0).integers(8, 200, 64)]
    for server in (pair.prefill, pair.decode):
        with ThreadPoolExecutor(16) as pool:
            for _ in range(1 + tokens // sum(lengths)):
                list(pool.map(lambda n: complete(server, prompts.of(n), 1 + n % 7, timeout=120), lengths))  # noqa: B023


def compare_engines(
    backends: Annotated[list[str], typer.Argument(help=COMPARED)],
    model: Annotated[str, typer.Option(help=f"Shape of the model: {', '.join(SHAPES)}.")] = "llama-3-8b",
    gpus: Gpus = "0,1",
    case: Annotated[
        list[str],
        typer.Option(help="Tokens per prompt, such as 1024, or 1024x16 for 16 prompts in parallel; may be repeated."),
    ] = CASES,
    rounds: Rounds = 7,
    pairs_alike: Annotated[
        bool,
        typer.Option("--pairs-alike", help="Also measure a second pair like the first one, to see what chance does."),
    ] = False,
    plain: Annotated[
        bool, typer.Option(help="Also measure a server without a connector, on the decode servers' GPU.")
    ] = False,
    cache_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens that each server's cache holds; 0: little more than the largest case. A load within a step borrows blocks, and "
            "no more than a quarter of them is lent.",
        ),
    ] = 0,
    keep_logs: KeepLogs = None,
) -> None:
    """Measure the time to first token on real vLLM servers with a model of realistic size, with back ends in turns.

    Prints one JSON object per line.
    """
    shape, cases = shape_of(model), [PromptCase.parse(text) for text in case]
    for compared in backends:
        parsed(compared, STOCK)
    decoding = OTHERS if plain else 0
    held = max(cache_tokens, room(cases, decoding))
    usual = server_flags(shape, cases, held, decoding, bool(gpus))
    with starting(model, usual, gpus, keep_logs=keep_logs) as starter:
        without = starter.start("plain", "decode") if plain else None
        pairs: dict[str, VllmPair] = {}
        for name in [*backends, *backends[:1]] if pairs_alike else backends:
            same = sum(key == name or key.startswith(f"{name} (") for key in pairs)
            pairs[f"{name} ({same + 1})" if same else name] = started(starter, name, without)
        if without is not None:
            await_ready([without], START_S)

        prompts = Prompts(shape.vocab)
        turns = EngineTurns(pairs, prompts, rounds, starter.tell, progress())
        turns.ready()
        turns.each("filling all caches once", lambda name, pair: scatter(pair, prompts, held))
        for one in cases:
            turns.first_tokens(one)
        turns.idle()
    raise typer.Exit(int(turns.failed))


def room(cases: Sequence[PromptCase], others: int) -> int:
    """Return how many tokens a server's cache must hold: those of the largest case, and what is released a moment later."""
    return max(case.tokens * case.at_once for case in cases) * 5 // 4 + 4096 + others * OTHERS_TOKENS


def server_flags(shape: Shape, cases: Sequence[PromptCase], held: int, others: int, gpu: bool) -> list[str]:
    """Return what sets these servers apart from the demo's: a cache of ``held`` tokens for these cases."""
    longest, most = max(case.tokens for case in cases), max(case.at_once for case in cases)
    flags = ["--dtype", shape.dtype, "--max-num-seqs", str(max(16, most) + others)]
    flags += ["--kv-cache-memory-bytes", str(held * shape.token_bytes)]
    flags += ["--max-model-len", str(min(shape.max_len, max(longest, OTHERS_TOKENS) + 256))]
    if gpu:
        flags += ["--no-enforce-eager", "--block-size", "16", "--max-num-batched-tokens", "8192"]
    return flags
