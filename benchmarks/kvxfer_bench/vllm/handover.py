"""``kvxfer bench handover``: what a load costs a decode engine besides moving its bytes, counted in steps of vLLM's own engine loop.

While other requests decode, or none does, prompts arrive one after the other, and the KV of each is ready at the producer. The number of
steps that each waits is counted exactly; when it reached each stage is taken from its trace (``trace`` in the settings).
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from typing import Annotated, Any

import typer

from kvxfer.config import Config
from kvxfer_bench.options import Backend, Json
from kvxfer_bench.table import tables

OTHERS = 8
WARM_UP = 3
"""Loads at the start that are not counted: they make the link and show how fast it is."""
STAGES = ("fetched", "began", "asked", "announced", "heard", "arrived", "ended", "seen", "computed")
"""The stages of a trace, and then the launch of the step that computes the first token."""
WAYS = {"in_step": "sync", "beside": "async"}
MODES = {"stepwise": False, "overlapped": True}


def measure(
    tokens: int,
    rounds: int,
    step_ms: float,
    budget_ms: float,
    backend: str,
    overlap: bool = False,
    others: int = OTHERS,
) -> dict[str, Any]:
    """Load prompts of ``tokens`` tokens one after the other into an engine whose steps take ``step_ms``; count ``rounds`` of them.

    With a ``budget_ms`` (``step_budget``) of 0, all loads are async. While they come, ``others`` requests decode.

    Returns:
        The further steps that each load took, and how many steps began between its end and the moment at which the scheduler side
        knew. For each stage, the median over these loads of the time at which it was reached, in µs from the request's arrival; and,
        for each stage but the first, how long after the stage before it that was.
    """
    from kvxfer_bench.vllm.played import (
        engines,
    )  # here, because it loads vLLM, and the program loads this file even for --help

    settings = {"backend": backend, "step_budget": budget_ms / 1000}
    further, computed, unseen = [], [], []
    with engines(settings, step_ms / 1000, overlap) as (engine, producer, source):
        for i in range(others):
            engine.scheduler.add_request(engine.request(f"other{i}", 16, 1 << 14))
        for i in range(rounds + WARM_UP):
            request, prompt = engine.load_from(source, f"load{i}", tokens)
            producer("compute", *prompt)
            engine.make_step()
            begun, first = time.monotonic(), engine.steps + 1
            engine.scheduler.add_request(request)
            engine.until(request.request_id)
            step, computing = engine.computed[request.request_id]
            further.append(step - first)
            computed.append(round(1e6 * (computing - begun)))
            us = engine.traces()[-1]["us"]
            unseen.append(sum(begun + us["ended"] / 1e6 < at <= begun + us["seen"] / 1e6 for at in engine.begun))
        lines = engine.traces()[WARM_UP:]
    ladders = [line["us"] | {"computed": at} for line, at in zip(lines, computed[WARM_UP:], strict=True)]
    steps = list(itertools.pairwise(STAGES))
    return {
        "further_steps": further[WARM_UP:],
        "unseen_steps": unseen[WARM_UP:],
        "ladder_us": {stage: round(statistics.median(x[stage] for x in ladders)) for stage in STAGES},
        "spent_us": {b: round(statistics.median(x[b] - x[a] for x in ladders)) for a, b in steps},
    }


def handover(
    tokens: Annotated[int, typer.Option(min=2, help="Length of each prompt, in tokens.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each kind.")] = 20,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Length of a decode engine's step, in milliseconds.")] = 20.0,
    budget_ms: Annotated[
        float, typer.Option(min=0.1, max=1000, help="step_budget of sync loads, in milliseconds.")
    ] = 1000 * Config().step_budget,
    backend: Backend = "cma",
    as_json: Json = False,
) -> None:
    """Count the engine steps that a load costs while other requests decode, and time its stages; and if none does."""
    found: dict[str, Any] = {
        "backend": backend,
        "tokens": tokens,
        "step_ms": step_ms,
        "budget_ms": budget_ms,
        "idle": {},
    }
    for way, budget in (("in_step", budget_ms), ("beside", 0.0)):
        for where, others in ((found, OTHERS), (found["idle"], 0)):
            where[way] = {
                mode: measure(tokens, rounds, step_ms, budget, backend, over, others) for mode, over in MODES.items()
            }
        found[f"extra_steps_{way}"] = max(max(found[way][mode]["further_steps"]) for mode in MODES)
    if as_json:
        typer.echo(json.dumps(found))
        return
    typer.echo("\nFurther steps of each load, and µs from one stage to the next:\n")
    rows = [
        {"loads": f"{words}, {mode}", "others": others, "further steps": one["further_steps"], **one["spent_us"]}
        for where, others in ((found, OTHERS), (found["idle"], 0))
        for way, words in WAYS.items()
        for mode, one in where[way].items()
    ]
    typer.echo(tables(rows))
