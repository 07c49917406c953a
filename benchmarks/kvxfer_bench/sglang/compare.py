"""``kvxfer bench sglang``: real SGLang servers, with kvxfer's back ends beside SGLang's own transfers, in turns.

Pairs are compared by tokens, first tokens and throughput.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvxfer.cli.terminal import Say, progress
from kvxfer.errors import ConfigError
from kvxfer_bench.options import Flags, Gpus, KeepLogs, Rounds, known_here
from kvxfer_bench.servers import START_S, PairTurns, Starter, Tell, shape_of, starting
from kvxfer_bench.sglang.servers import (
    GENERATE,
    STOCK,
    SglangPair,
    SglangServer,
    ask_pair,
    ask_streaming,
    generated,
    sampling,
    started_pair,
)
from kvxfer_vllm.demo.model import SHAPES
from kvxfer_vllm.demo.servers import Server, await_ready

LENGTHS = (1, 9, 64, 257, 700, 1500)
TIES = {"float32": 0.02, "bfloat16": 0.25}
"""By dtype, the difference of log probabilities below which rounding may decide which token is the best."""
ROOM = 256
"""Tokens of a context beyond the longest prompt."""


@dataclass(frozen=True)
class Expectation:
    """What a plain server generates behind a prompt, and by how much each token was the best.

    Attributes:
        ids: The prompt.
        tokens: The tokens.
        margins: The difference between the log probabilities of the best token and the next one.
    """

    ids: list[int]
    tokens: list[int]
    margins: list[float]

    def verdict(self, tokens: Sequence[int], tie: float) -> str:
        """Return ``same``, ``tied`` or ``different``; a tie is where the first other token was nearly as good.

        Args:
            tokens: Those of other servers.
            tie: The margin below which rounding may decide either way.
        """
        for n, (own, other) in enumerate(zip(self.tokens, tokens, strict=False)):
            if own != other:
                return "tied" if self.margins[n] <= tie else "different"
        return "same" if len(tokens) == len(self.tokens) else "different"


def made_up(seed: int | str, tokens: int) -> list[int]:
    """Return a prompt of random tokens."""
    chosen = random.Random(seed)
    return [chosen.randrange(256) for _ in range(tokens)]


def expect(plain: Server, prompts: Sequence[list[int]], tokens: int) -> list[Expectation]:
    """Return what a plain server generates behind some prompts.

    Raises:
        ServerError: It fails.
    """
    found = []
    for ids in prompts:
        answer = plain.post(GENERATE, sampling(ids, tokens, return_logprob=True, top_logprobs_num=2), 120.0)
        best = [sorted((one[0] for one in top), reverse=True) for top in answer["meta_info"]["output_top_logprobs"]]
        found.append(Expectation(ids, generated(answer), [first - second for first, second, *_ in best]))
    return found


class SglangTurns(PairTurns[SglangPair]):
    """Measures pairs of SGLang servers by name, in turns."""

    def __init__(self, pairs: Mapping[str, SglangPair], tell: Tell, say: Say) -> None:
        super().__init__(pairs, tell, say)
        self._threads = ThreadPoolExecutor(256)

    def tokens(self, expectations: Sequence[Expectation], tie: float) -> None:
        """Tell how many answers are those of a plain server: one by one, and all at once."""

        def one(name: str, pair: SglangPair) -> None:
            def verdicts(answers: Sequence[list[int]]) -> dict[str, int]:
                return dict(Counter(e.verdict(tokens, tie) for e, tokens in zip(expectations, answers, strict=True)))

            each = [ask_pair(self._threads, pair, e.ids, len(e.tokens)).tokens() for e in expectations]
            asked = [ask_pair(self._threads, pair, e.ids, len(e.tokens)) for e in expectations]
            together = verdicts([one.tokens() for one in asked])
            self.tell({"backend": name, "one_by_one": verdicts(each), "at_once": together})

        self.each("tokens", one)

    def load(self, at_once: int, prompt: int, tokens: int, rounds: int) -> None:
        """Tell first tokens and throughput with several requests at once; one more round warms up."""
        first: dict[str, list[float]] = {name: [] for name in self.pairs}
        rates: dict[str, list[float]] = {name: [] for name in self.pairs}

        def one(name: str, pair: SglangPair, number: int) -> None:
            prompts = [made_up(f"{name} {number} {n}", prompt) for n in range(at_once)]
            begun = time.monotonic()
            with ThreadPoolExecutor(at_once) as readers:
                streams = list(readers.map(lambda ids: ask_streaming(self._threads, pair, ids, tokens), prompts))
            took = time.monotonic() - begun
            if number:
                first[name] += [first_s for first_s, _ in streams]
                rates[name].append(sum(count for _, count in streams) / took)

        self.rounds(f"{at_once} at once", rounds, one)
        for name in self.pairs:
            self.tell(
                {
                    "backend": name,
                    "at_once": at_once,
                    "prompt": prompt,
                    "first_ms": round(1e3 * statistics.median(first[name]), 1),
                    "first_ms_most": round(1e3 * max(first[name]), 1),
                    "tokens_per_s": round(statistics.median(rates[name]), 1),
                }
            )


def measure_sglang(
    starter: Starter,
    backends: Iterable[str],
    tell: Tell,
    at_once: Sequence[int],
    prompt: int,
    tokens: int,
    rounds: int,
    tie: float,
) -> bool:
    """Start a plain server, then a pair for each back end, and measure the pairs in turns; return whether all went well.

    Args:
        starter: Starts servers.
        backends: kvxfer's, or SGLang's own behind ``sglang:``.
        tell: Called with each result.
        at_once: Numbers of requests at once.
        prompt: Tokens of a prompt, where time is measured.
        tokens: Tokens behind each prompt.
        rounds: Rounds that count.
        tie: As for ``Expectation.verdict``.

    Raises:
        ServerError: The plain server fails.
    """
    say = progress()
    say("a plain server")
    plain = starter.start("plain", "decode")
    await_ready([plain], START_S)
    expected = expect(plain, [made_up(n, n) for n in LENGTHS], tokens)
    plain.stop()  # it leaves its memory to the others
    pairs = {
        name: started_pair(name, lambda name, role, flags, env: starter.start(name, role, None, flags, env))
        for name in backends
    }
    turns = SglangTurns(pairs, tell, say)
    turns.ready()
    turns.tokens(expected, tie)
    for count in at_once:
        turns.load(count, prompt, tokens, rounds)
    turns.tokens(expected, tie)
    return not turns.failed


def compare_sglang(
    backends: Annotated[
        list[str], typer.Argument(help="Back ends to compare; sglang:nixl and sglang:mooncake are SGLang's own.")
    ],
    model: Annotated[
        str, typer.Option(help=f"A shape of a model ({', '.join(SHAPES)}), or a model's folder.")
    ] = "tiny",
    gpus: Gpus = "0,1",
    at_once: Annotated[list[int], typer.Option(help="Requests in parallel; may be repeated.")] = [1, 8, 32],  # noqa: B006
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt where time is measured.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 32,
    rounds: Rounds = 3,
    flags: Flags = "",
    keep_logs: KeepLogs = None,
) -> None:
    """Compare back ends on real SGLang servers, in turns: tokens, first tokens and throughput.

    Prints one JSON object per line.
    """
    for name in backends:
        if not name.startswith(STOCK):
            known_here(name)
    shape = None if Path(model).is_dir() else shape_of(model)
    dtype = "bfloat16" if shape is None else shape.dtype
    context = max(prompt, *LENGTHS) + tokens + ROOM
    if shape is not None and context > shape.max_len:
        raise ConfigError(
            f"--prompt {prompt} and --tokens {tokens} do not fit into the {shape.max_len} tokens of {model}"
        )
    room = 2 * max(at_once) * (prompt + tokens) + sum(LENGTHS) + len(LENGTHS) * tokens + 4096 + context
    usual = ["--dtype", dtype, "--context-length", str(context), "--max-total-tokens", str(room)]
    usual += ["--max-running-requests", str(max(16, *at_once)), "--page-size", "16"]
    with starting(model, usual, gpus, flags, keep_logs, SglangServer) as starter:
        well = measure_sglang(starter, backends, starter.tell, at_once, prompt, tokens, rounds, TIES[dtype])
    raise typer.Exit(int(not well))
