"""``kvxfer bench sglang``: real SGLang servers, with kvxfer's back ends beside SGLang's own transfers, in turns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.cli.terminal import progress
from kvxfer.errors import ConfigError
from kvxfer_bench.sglang.servers import SglangPair, SglangServer, started_pair
from kvxfer_bench.sglang.turns import LONG, SglangTurns, expect, made_up
from kvxfer_vllm.demo.model import SHAPES, write_model, write_shape
from kvxfer_vllm.demo.servers import Server, await_ready, ended_by_sigterm, ended_together

LENGTHS = (1, 9, 64, 257, 700, 1500)
TIES = {"float32": 0.02, "bfloat16": 0.25}
"""By dtype, the difference of log probabilities below which rounding may decide which token is the best."""
ROOM = 256
"""Tokens of a context beyond the longest prompt."""


def measure_sglang(
    backends: Iterable[str],
    model: Path,
    logs: Path,
    tell: Callable[[Mapping[str, Any]], None],
    gpus: Sequence[str] = (),
    flags: Sequence[str] = (),
    at_once: Sequence[int] = (1, 8, 32),
    prompt: int = 1024,
    tokens: int = 32,
    rounds: int = 3,
    tie: float = TIES["bfloat16"],
    aborted: int = LENGTHS[-1],
    kind: type[Server] = SglangServer,
) -> bool:
    """Start a plain server, then a pair for each back end, and measure the pairs in turns; return whether all went well.

    Args:
        backends: kvxfer's, or SGLang's own behind ``sglang:``.
        model: Folder of the model.
        logs: Folder for the servers' logs.
        tell: Called with each result.
        gpus: Those of the prefill and the decode servers, or one for both; none for servers without any.
        flags: Further flags of all servers.
        at_once: Numbers of requests at once.
        prompt: Tokens of a prompt, where time is measured.
        tokens: Tokens behind each prompt.
        rounds: Rounds that count.
        tie: As for ``Expectation.verdict``.
        aborted: Tokens of a prompt that is aborted.
        kind: What servers are started.

    Raises:
        ServerError: The plain server fails.
    """
    begun: list[Server]
    with ended_together() as begun:

        def start(name: str, role: str, told: list[str], env: dict[str, str]) -> Server:
            on = {"CUDA_VISIBLE_DEVICES": gpus[0 if role == "prefill" else -1]} if gpus else {}
            begun.append(kind(name, model, logs, None, [*told, *flags], {**env, **on}))
            return begun[-1]

        say = progress()
        say("a plain server")
        plain = start("plain", "", [], {})
        await_ready([plain], 600)
        expected = expect(plain, [made_up(n, n) for n in LENGTHS], tokens)
        plain.stop()  # it leaves its memory to the others
        pairs: dict[str, SglangPair] = {name: started_pair(name, start) for name in backends}
        turns = SglangTurns(pairs, tell, say)
        turns.ready()
        turns.tokens(expected, tie)
        for count in at_once:
            turns.load(count, prompt, tokens, rounds)
        turns.aborts(aborted)
        turns.tokens(expected, tie)  # after aborts
    return not turns.failed


def compare_sglang(
    backends: Annotated[
        list[str], typer.Argument(help="Back ends to compare; sglang:nixl and sglang:mooncake are SGLang's own.")
    ],
    model: Annotated[
        str, typer.Option(help=f"A shape of a model ({', '.join(SHAPES)}), or a model's folder.")
    ] = "tiny",
    gpus: Annotated[
        str, typer.Option(help="GPUs of the prefill and the decode servers, such as 0,1, or 0 for both.")
    ] = "0,1",
    at_once: Annotated[list[int], typer.Option(help="Requests in parallel; may be repeated.")] = [1, 8, 32],  # noqa: B006
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt where time is measured.")] = 1024,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one that warms up.")] = 3,
    dtype: Annotated[str, typer.Option(help=f"Of the model: {', '.join(TIES)}.")] = "bfloat16",
    flags: Annotated[str, typer.Option(help="Further flags of all servers, separated by spaces.")] = "",
    keep_logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs in this folder.")] = None,
) -> None:
    """Compare back ends on real SGLang servers, in turns: tokens, first tokens, throughput, and what aborts take.

    Prints one JSON object per line.
    """
    shape = SHAPES.get(model)
    if shape is None and not Path(model).is_dir():
        raise ConfigError(f"unknown --model {model!r}: it is no folder, and the shapes are {', '.join(SHAPES)}")
    if dtype not in TIES:
        raise ConfigError(f"unknown --dtype {dtype!r}; it is one of {', '.join(TIES)}")
    longest = max(prompt, *LENGTHS) + tokens + ROOM
    if shape is not None and longest > shape.max_len:
        raise ConfigError(
            f"--prompt {prompt} and --tokens {tokens} do not fit into the {shape.max_len} tokens of {model}"
        )
    context = longest if shape is None else min(4 * longest, shape.max_len)  # prefill of an aborted prompt takes long
    room = 2 * max(at_once) * (prompt + tokens) + sum(LENGTHS) + len(LENGTHS) * tokens + 4096 + context
    usual = ["--dtype", dtype, "--context-length", str(context), "--max-total-tokens", str(room)]
    usual += ["--max-running-requests", str(max(16, *at_once)), "--page-size", "16"]
    on = [gpu.strip() for gpu in gpus.split(",") if gpu.strip()]
    with ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="kvxfer-sglang-") as folder:
        where, logs = Path(folder) / "model", keep_logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        if shape is None:
            where = Path(model)
        elif model == "tiny":
            write_model(where)
        else:
            write_shape(where, shape)
            usual += ["--load-format", "dummy"]

        def tell(row: Mapping[str, Any]) -> None:
            typer.echo(json.dumps({"model": model, "gpus": on, **row}))

        told = [*usual, *flags.split()]
        aborted = context - LONG - 16  # SGLang keeps some of the context for itself
        well = measure_sglang(
            backends, where, logs, tell, on, told, at_once, prompt, tokens, rounds, TIES[dtype], aborted
        )
    raise typer.Exit(int(not well))
