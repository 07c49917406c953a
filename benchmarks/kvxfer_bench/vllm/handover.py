"""``kvxfer bench handover``: what a load costs a decode engine besides moving its bytes, counted in steps of vLLM's own engine loop.

While other requests decode, or none does, prompts arrive one after the other, and the KV of each is ready at the producer. The number of
steps that each waits is counted exactly; when it reached each stage is taken from its trace (``trace`` in the settings).
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvxfer.config import Config
from kvxfer.identity import TransferBase, TransferId

OTHERS = 8
WARM_UP = 3
"""Loads at the start that are not counted: they make the link and show how fast it is."""
CHUNKS, CHUNKED, TRANSFER_MS = 8, 5, 200.0
"""For prompts that both engines get at once: chunks of a prompt, prompts of each kind, and milliseconds that the throttled link
takes for one."""
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
    from kvxfer_bench.vllm.played_prefill import Prompt
    from kvxfer_vllm.said import content_name

    settings = {"backend": backend, "step_budget": budget_ms / 1000}
    further, computed, unseen = [], [], []
    with engines(settings, step_ms / 1000, overlap) as (engine, producer):
        source = producer.source
        for i in range(others):
            engine.add(engine.request(f"other{i}", 16, 1 << 14))
        for i in range(rounds + WARM_UP):
            base = f"own/{source.epoch:x}/r{i}"
            params = {
                "do_remote_prefill": True,
                "remote_host": source.host,
                "remote_port": source.port,
                "kvxfer_transfer": base,
                "kvxfer_epoch": f"{source.epoch:x}",
            }
            request = engine.request(f"load{i}", tokens, 1, params)
            content = engine.digest(request)
            producer.begin(Prompt(TransferId(TransferBase(content_name(base, content)), 0), content, tokens, 1, 0.0))
            producer.last_token()
            engine.step()
            begun, first = time.monotonic(), engine.steps + 1
            engine.add(request)
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


def picture(found: dict[str, Any]) -> str:
    """Return an SVG picture of the stages of both ways, for steps that do not overlap."""
    ways = {way: found[key]["stepwise"]["ladder_us"] for key, way in WAYS.items()}
    most = max(max(ladder.values()) for ladder in ways.values())
    lines, y = [], 30
    for way, ladder in ways.items():
        lines.append(f'<text x="10" y="{y}" font-weight="bold">{way}</text>')
        for stage, us in ladder.items():
            y += 20
            width = max(1.0, 380 * us / most)
            lines.append(
                f'<text x="20" y="{y}">{stage}</text><rect x="190" y="{y - 11}" width="{width:.1f}" height="13"/>'
            )
            lines.append(f'<text x="{195 + width:.1f}" y="{y}">{us} µs</text>')
        y += 34
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {y}" font-family="sans-serif" font-size="12" fill="#345">'
    return "\n".join([head, '<rect width="680" height="100%" fill="#fff"/>', *lines, "</svg>", ""])


def handover(
    tokens: Annotated[int, typer.Option(min=2, help="Length of each prompt, in tokens.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Loads of each kind.")] = 20,
    step_ms: Annotated[float, typer.Option(min=0.1, help="Length of a decode engine's step, in milliseconds.")] = 20.0,
    budget_ms: Annotated[
        float, typer.Option(min=0.1, max=1000, help="step_budget of sync loads, in milliseconds.")
    ] = 1000 * Config().step_budget,
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "cma",
    svg: Annotated[Path | None, typer.Option(help="Also draw the stages into this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the engine steps that a load costs while other requests decode, and time its stages; and if none does.

    It also measures how much of a transfer remains after the producer's last token if both engines get the request in parallel and the
    link takes half as long as the prefill.
    """
    from kvxfer_bench.vllm.exposed import exposure  # here: see ``measure``

    found: dict[str, Any] = {"backend": backend, "tokens": tokens, "step_ms": step_ms, "budget_ms": budget_ms}
    for way, budget in (("in_step", budget_ms), ("beside", 0.0)):
        found[way] = {mode: measure(tokens, rounds, step_ms, budget, backend, over) for mode, over in MODES.items()}
        found[f"extra_steps_{way}"] = max(max(found[way][mode]["further_steps"]) for mode in MODES)
    found["idle"] = {
        way: {mode: measure(tokens, rounds, step_ms, budget, backend, over, 0) for mode, over in MODES.items()}
        for way, budget in (("in_step", budget_ms), ("beside", 0.0))
    }
    found["exposed"] = exposure(CHUNKS, CHUNKED, TRANSFER_MS, backend)
    if svg is not None:
        svg.write_text(picture(found))
    if as_json:
        typer.echo(json.dumps(found))
        return
    for way, words in WAYS.items():
        typer.echo(f"{words}: {found[f'extra_steps_{way}']} further steps at most")
        for mode in MODES:
            spent = ", ".join(f"{stage} {us}" for stage, us in found[way][mode]["spent_us"].items())
            typer.echo(f"  {mode}: {found[way][mode]['further_steps']}; µs from one stage to the next: {spent}")
    for way, words in WAYS.items():
        for mode in MODES:
            spent = found["idle"][way][mode]["spent_us"]
            typer.echo(
                f"{words}, nothing else to do, {mode}: {spent['seen']} µs from the end of a load until the scheduler knows, "
                f"{spent['computed']} until it is computed"
            )
    left = found["exposed"]
    typer.echo(
        f"still to be moved at the producer's last token: with one chunk, {left['whole_ms']} ms; with {CHUNKS} chunks, "
        f"{left['chunked_ms']} ms, ratio {left['ratio']} (goal: at most {left['goal']}). With one chunk in bands of layers, "
        f"{left['banded_ms']} ms, ratio {left['banded_ratio']} (goal: at most {left['banded_goal']}). With {CHUNKS} chunks and the "
        f"whole prompt in one of the producer's blocks, {left['one_block_ms']} ms, ratio {left['one_block_ratio']} (goal: at most "
        f"{left['goal']})"
    )
