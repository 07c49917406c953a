"""``kvxfer bench sglang``: real SGLang servers, with kvxfer's back ends beside SGLang's own transfers, in turns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.terminal import progress
from kvxfer.errors import ConfigError
from kvxfer_bench.options import Flags, Gpus, KeepLogs, Rounds
from kvxfer_bench.servers import START_S, Starter, Tell, shape_of, starting
from kvxfer_bench.sglang.servers import SglangServer, started_pair
from kvxfer_bench.sglang.turns import SglangTurns, expect, made_up
from kvxfer_vllm.demo.model import SHAPES
from kvxfer_vllm.demo.servers import await_ready

LENGTHS = (1, 9, 64, 257, 700, 1500)
TIES = {"float32": 0.02, "bfloat16": 0.25}
"""By dtype, the difference of log probabilities below which rounding may decide which token is the best."""
ROOM = 256
"""Tokens of a context beyond the longest prompt."""


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
    turns.ready(lambda pair: (pair.prefill, pair.decode))
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
    dtype: Annotated[str, typer.Option(help=f"Of the model: {', '.join(TIES)}.")] = "bfloat16",
    flags: Flags = "",
    keep_logs: KeepLogs = None,
) -> None:
    """Compare back ends on real SGLang servers, in turns: tokens, first tokens and throughput.

    Prints one JSON object per line.
    """
    shape = None if Path(model).is_dir() else shape_of(model)
    if dtype not in TIES:
        raise ConfigError(f"unknown --dtype {dtype!r}; it is one of {', '.join(TIES)}")
    context = max(prompt, *LENGTHS) + tokens + ROOM
    if shape is not None and context > shape.max_len:
        raise ConfigError(
            f"--prompt {prompt} and --tokens {tokens} do not fit into the {shape.max_len} tokens of {model}"
        )
    room = 2 * max(at_once) * (prompt + tokens) + sum(LENGTHS) + len(LENGTHS) * tokens + 4096 + context
    usual = ["--dtype", dtype, "--context-length", str(context), "--max-total-tokens", str(room)]
    usual += ["--max-running-requests", str(max(16, *at_once)), "--page-size", "16"]
    with starting(model, usual, gpus, flags, keep_logs, SglangServer) as starter:

        def tell(row: Mapping[str, Any]) -> None:
            typer.echo(json.dumps({"model": model, "gpus": starter.gpus, **row}))

        well = measure_sglang(starter, backends, tell, at_once, prompt, tokens, rounds, TIES[dtype])
    raise typer.Exit(int(not well))
