"""``kvxfer bench first-token``: what a user waits for at a real decode server whose KV is ready at a prefill server.

Eight other requests decode meanwhile. Three kinds of request take turns: one of two tokens, which is the least that this
server needs for a first token; one whose KV comes from the prefill server; and one of the same length that is computed
here. What the second takes longer than the first is told in steps of the engine, which are the pauses between the tokens
of the others.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer_vllm.demo.metrics import received
from kvxfer_vllm.demo.model import MAX_LEN, write_model
from kvxfer_vllm.demo.routing import PREFILL_PARAMS, complete
from kvxfer_vllm.demo.servers import Server, await_ready, connector, ended_by_sigterm
from kvxfer_vllm.demo.streams import busy, stream

OTHERS = 8
SETTLE_S = 0.15
"""Between two requests, so that neither is in the other's steps."""

_numbers = itertools.count(1)


def _prompt(tokens: int) -> str:
    """Return a prompt of one token a character that no server has seen."""
    begin = f"{next(_numbers)}: {time.time_ns()} "
    return (begin + "kv cache " * tokens)[:tokens]


def measure(prefill: Server, decode: Server, tokens: int, rounds: int, others: int = OTHERS) -> dict[str, Any]:
    """Measure on two servers that run, of which the second is kept busy by ``others`` requests; it must have room for one more.

    Returns:
        Medians in milliseconds, and what a load took longer than the least, in steps. ``first_token_ratio``: the first token with
        a load, in terms of a step and the load's transfer, which are the least that it could take.
    """
    spans: dict[str, list[tuple[float, float]]] = {"least": [], "loaded": [], "computed": []}
    before = received(decode)

    def take_turns() -> None:
        for kind, taken in spans.items():
            prompt = _prompt(2 if kind == "least" else tokens)
            params = complete(prefill, prompt, 1, PREFILL_PARAMS).kv_transfer_params if kind == "loaded" else None
            begin = time.perf_counter()
            taken.append((begin, next(stream(decode, prompt, 1, params))))
            time.sleep(SETTLE_S)

    with busy(decode, others, MAX_LEN - 64) as decoding:
        take_turns()  # links are made, and code is cold
        warm = received(decode)
        for taken in spans.values():
            taken.clear()
        for _ in range(rounds):
            take_turns()
        decoding.check()
        after = received(decode)
        came, transfer = after - before, 1e3 * (after - warm).seconds / rounds
        first = {kind: statistics.median(1e3 * (end - begin) for begin, end in taken) for kind, taken in spans.items()}
        loading, calm = decoding.during(spans["loaded"]), decoding.during(spans["least"])
    step = statistics.median(gap for gap in calm)
    return {
        "tokens": tokens,
        "rounds": rounds,
        "step_ms": round(step, 2),
        **{f"first_token_{kind}_ms": round(ms, 2) for kind, ms in first.items()},
        "load_in_steps": round((first["loaded"] - first["least"]) / step, 2),
        "transfer_ms": round(transfer, 2),
        "first_token_ratio": round(first["loaded"] / (step + transfer), 2),
        "others_gap_ms": round(statistics.median(calm), 2),
        "others_gap_while_loading_ms": round(statistics.median(loading), 2),
        "others_longest_gap_while_loading_ms": round(max(loading), 2),
        "tokens_loaded": came.tokens,
        "failed": came.failed,
    }


def first_token(
    tokens: Annotated[int, typer.Option(min=64, max=MAX_LEN - 64, help="Of each prompt.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each kind, in turns; one more warms up.")] = 20,
    backend: Annotated[str, typer.Option(help="Which back end moves the KV.")] = "cma",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the first token at a busy decode server whose KV is ready at a prefill server: two real vLLM servers on this machine."""
    with ended_by_sigterm(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(folder) / "model"
        write_model(model)
        flags = ["--max-num-seqs", str(OTHERS + 4), "--max-num-batched-tokens", str(MAX_LEN)]
        servers: list[Server] = []
        for role in ("producer", "consumer"):
            config = connector(f"kv_{role}", {"backend": backend})
            servers.append(Server(role, model, Path(folder), config, flags))
            stack.callback(servers[-1].stop)
        await_ready(servers, 300.0)
        found = {"backend": backend, **measure(servers[0], servers[1], tokens, rounds)}
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo(
        f"first token of {tokens} tokens: {found['first_token_loaded_ms']} ms with KV from the prefill server, "
        f"{found['first_token_computed_ms']} ms computed, {found['first_token_least_ms']} ms for two tokens; that is "
        f"{found['load_in_steps']} steps of {found['step_ms']} ms more than the least, and {found['first_token_ratio']} of a step and "
        f"the transfer of {found['transfer_ms']} ms\n"
        f"the others' tokens came every {found['others_gap_ms']} ms, and every {found['others_gap_while_loading_ms']} ms "
        f"while KV was loaded ({found['others_longest_gap_while_loading_ms']} ms at most)"
    )
