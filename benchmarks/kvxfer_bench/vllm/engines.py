"""``kvxfer bench engines``: time to first token on real vLLM servers with a model of realistic size, back ends in turns.

For each back end, a prefill and a decode server run on the given GPUs, with dummy weights. All pairs run at the same time but only one
is asked at a time, in a random order in each round, so that other load on the machine affects all of them alike. An additional server
without a connector shows what a connector costs while nothing moves.

The first configuration is compared with each of the others: a verdict for each case, such as "12.0 ms slower, interval 8.1 to 16.3". With
``--pairs-alike`` it is also compared with itself, which shows what chance does.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.cli.terminal import Say, progress, silent
from kvxfer.errors import ConfigError
from kvxfer_bench.compared import parsed
from kvxfer_bench.verdict import compare
from kvxfer_bench.vllm.idle import idle_cost
from kvxfer_bench.vllm.kinds import FirstTokens, PromptCase, Prompts
from kvxfer_bench.vllm.pairs import STOCK, ServerPair, Starter
from kvxfer_bench.vllm.streams import busy
from kvxfer_vllm.demo.model import SHAPES, Shape, write_shape
from kvxfer_vllm.demo.routing import complete
from kvxfer_vllm.demo.servers import Server, ServerError, await_ready, ended_by_sigterm, ended_together

START_S = 400.0
OTHERS, OTHERS_TOKENS = 8, 1024
"""Requests that decode during loads, and the tokens that each decodes before another takes its place."""
CASES = ["1024", "8192", "32768", "1024x16"]

COMPARED = (
    """Back ends to compare, with settings if wanted, such as 'nixl:{"blocks_outermost": false}'; """
    f"{' and '.join(STOCK)} are vLLM's own connectors."
)

Tell = Callable[[Mapping[str, Any]], None]


class Rounds:
    """Measures pairs of servers, by back end, in turns; one more round warms up.

    ``tell`` is called with each result, ``say`` with what it is at. A pair of which a server fails is left out from then on, which
    ``failed`` says.
    """

    def __init__(
        self, pairs: Mapping[str, ServerPair], prompts: Prompts, rounds: int, tell: Tell, say: Say = silent
    ) -> None:
        self._pairs, self._prompts, self._rounds, self._tell, self._say = dict(pairs), prompts, rounds, tell, say
        self.failed = False
        self._first = next(iter(self._pairs))

    def ready(self) -> None:
        """Wait until all servers answer."""
        servers = [server for pair in self._pairs.values() for server in (pair.prefill, pair.decode)]
        self._say(f"starting {len(servers)} servers, with a limit of {START_S:g} s for each")

        def answers(server: Server) -> None:
            self._say(f"{server.name} answers")

        self._each(lambda name, pair: await_ready([pair.prefill, pair.decode], START_S, answers))

    def scatter(self, tokens: int) -> None:
        """Use all caches as hours of serving would, so that what comes next gets blocks from everywhere.

        Requests of mixed lengths, ``tokens`` tokens in all, end in another order than they began.
        """
        self._say("filling all caches once")
        self._each(lambda name, pair: scatter(pair, self._prompts, tokens))

    def first_tokens(self, case: PromptCase, others: int) -> None:
        """Tell first tokens by kind, while ``others`` requests decode at the decode server that is asked."""
        timed = {name: FirstTokens(pair, self._prompts, case) for name, pair in self._pairs.items()}

        def one_round(name: str, pair: ServerPair) -> None:
            with busy(pair.decode, others, OTHERS_TOKENS) as decoding:
                timed[name].round(decoding)
                decoding.check()

        self._measure(f"time to first token, {case}", one_round)
        self._each(lambda name, pair: self._tell({"backend": name, "others": others, **timed[name].found()}))
        self._judge({name: timed[name].compared() for name in self._pairs}, {**asdict(case), "others": others})

    def _judge(self, taken: Mapping[str, Mapping[str, list[float]]], case: Mapping[str, Any]) -> None:
        """Tell how the first pair compares with each of the others, for each kind that both were timed by."""
        for name in [name for name in taken if self._first in taken and name != self._first]:
            for kind, first in taken[self._first].items():
                if kind in taken[name]:
                    found = compare(first, taken[name][kind])
                    sure = (
                        {} if found.low == -math.inf else {"interval_ms": [round(found.low, 2), round(found.high, 2)]}
                    )
                    row = {"compared": name, "with": self._first, **case, "kind": kind}
                    self._tell({**row, "slower_ms": round(found.median, 2), **sure, "verdict": found.words})

    def idle(self) -> None:
        """Tell what an idle connector costs a decode step, of those beside a server without a connector."""

        def one(name: str, pair: ServerPair) -> None:
            if pair.plain is not None:
                cost = idle_cost(pair, pair.plain, self._prompts, self._rounds, OTHERS)
                self._tell({"backend": name, "others": OTHERS, **cost})

        self._each(one)

    def _measure(self, what: str, one_round: Callable[[str, ServerPair], None]) -> None:
        for number in range(self._rounds + 1):
            self._say(f"{what}, round {number} of {self._rounds}" if number else f"{what}, warm-up")
            self._each(one_round, mixed=True)

    def _each(self, do: Callable[[str, ServerPair], None], mixed: bool = False) -> None:
        some = list(self._pairs.items())
        for name, pair in random.sample(some, len(some)) if mixed else some:
            try:
                do(name, pair)
            except ServerError as error:
                self.failed = True
                del self._pairs[name]
                self._tell({"backend": name, "error": str(error)})


def scatter(pair: ServerPair, prompts: Prompts, tokens: int) -> None:
    """Have both servers of a pair answer requests of mixed lengths, ``tokens`` tokens in all.

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
    gpus: Annotated[
        str,
        typer.Option(help="GPUs of the prefill and the decode servers, such as 0,1, or 0 for both; empty for CPUs."),
    ] = "0,1",
    case: Annotated[
        list[str],
        typer.Option(help="Tokens per prompt, such as 1024, or 1024x16 for 16 prompts in parallel; may be repeated."),
    ] = CASES,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that warms up.")] = 7,
    pairs_alike: Annotated[
        bool,
        typer.Option("--pairs-alike", help="Also measure a second pair like the first one, to see what chance does."),
    ] = False,
    others: Annotated[int, typer.Option(min=0, help="Requests that decode on the decode server all the time.")] = 0,
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
    flags: Annotated[str, typer.Option(help="Further flags of the servers, separated by spaces.")] = "",
    keep_logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
) -> None:
    """Measure the time to first token on real vLLM servers with a model of realistic size, with back ends in turns.

    Prints one JSON object per line.
    """
    if model not in SHAPES:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(SHAPES)}")
    shape, cases = SHAPES[model], [PromptCase.parse(text) for text in case]
    for compared in backends:
        parsed(compared)
    on = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()]
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvxfer-engines-") as folder, ended_together() as begun:
        where, logs = Path(folder) / "model", keep_logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        write_shape(where, shape)
        decoding = max(others, OTHERS if plain else 0)
        held = max(cache_tokens, room(cases, decoding))
        starter = Starter(
            where, logs, on, [*server_flags(shape, cases, held, decoding, bool(on)), *flags.split()], begun
        )
        without = starter.plain() if plain else None
        pairs: dict[str, ServerPair] = {}
        for name in [*backends, *backends[:1]] if pairs_alike else backends:
            same = sum(key == name or key.startswith(f"{name} (") for key in pairs)
            pairs[f"{name} ({same + 1})" if same else name] = starter.pair(name, without)
        if without is not None:
            await_ready([without], START_S)

        def tell(row: Mapping[str, Any]) -> None:
            typer.echo(json.dumps({"model": model, "gpus": on, **row}))

        turns = Rounds(pairs, Prompts(shape.vocab), rounds, tell, progress())
        turns.ready()
        turns.scatter(held)
        for one in cases:
            turns.first_tokens(one, others)
        turns.idle()
    raise typer.Exit(int(turns.failed))


def room(cases: Sequence[PromptCase], others: int) -> int:
    """Return how many tokens a server's cache must hold: those of the largest case, and what is released a moment later."""
    return max(case.tokens * case.at_once for case in cases) * 5 // 4 + 4096 + others * OTHERS_TOKENS


def server_flags(shape: Shape, cases: Sequence[PromptCase], held: int, others: int, gpu: bool) -> list[str]:
    """Return what sets these servers apart from the demo's: weights that are made up, and a cache of ``held`` tokens for these cases."""
    longest, most = max(case.tokens for case in cases), max(case.at_once for case in cases)
    flags = ["--load-format", "dummy", "--dtype", shape.dtype, "--max-num-seqs", str(max(16, most) + others)]
    flags += ["--kv-cache-memory-bytes", str(held * shape.token_bytes)]
    flags += ["--max-model-len", str(min(shape.max_len, max(longest, OTHERS_TOKENS) + 256))]
    if gpu:
        flags += ["--no-enforce-eager", "--block-size", "16", "--max-num-batched-tokens", "8192"]
    return flags
