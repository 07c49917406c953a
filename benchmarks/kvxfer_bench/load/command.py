"""``kvxfer bench load``: what transfers cost engines that are busy, and what busy engines cost transfers, in one table.

Prefill computes prompts without a pause, decode decodes, and loads come at random times. The phases of ``phases.py`` take turns, and so do
the configurations that are compared, in a random order in each round.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Annotated

import typer

from kvxfer.cli.terminal import Say, progress
from kvxfer_bench.load.phases import CALM, PHASES, Measure, OpenLoop, Phase, load_rows
from kvxfer_bench.load.played import played
from kvxfer_bench.options import STOCK, Gpus, Json, Rounds, parsed
from kvxfer_bench.table import tables
from kvxfer_bench.verdict import mixed_rounds


def in_turns(
    measures: Mapping[str, Measure], arrivals: OpenLoop, rounds: int, say: Say
) -> dict[str, list[dict[str, Phase]]]:
    """Measure all phases of each configuration in each round, after one round that warms up."""
    found: dict[str, list[dict[str, Phase]]] = {name: [{} for _ in range(rounds)] for name in measures}
    turns = {f"{name}, {phase}": (name, phase) for name in measures for phase in PHASES}
    for number, turn in mixed_rounds("load", turns, rounds, say):
        name, phase = turns[turn]
        rate = 0.0 if phase == CALM else arrivals.a_second
        measured = measures[name](phase, OpenLoop(arrivals.seconds, rate, arrivals.tokens, number))
        if number:
            found[name][number - 1][phase] = measured
    return found


def load(
    backends: Annotated[
        list[str],
        typer.Argument(help="""Back ends to compare, with settings if wanted, such as 'cma:{"step_budget": 0}'."""),
    ],
    rate: Annotated[float, typer.Option(min=0.01, help="Loads a second; as many cached prompts come.")] = 4.0,
    tokens: Annotated[list[int], typer.Option(min=16, help="Tokens of a load; may be repeated.")] = [1024],  # noqa: B006
    others: Annotated[int, typer.Option(min=1, help="Requests that decode all the time.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=120, help="Length of a phase.")] = 10.0,
    rounds: Rounds = 6,
    model: Annotated[
        str,
        typer.Option(
            help="Have real vLLM servers, with a model of this shape: tiny or llama-3-8b. Without it, engines are played: their steps "
            "compute Python and small torch operations, and wait as for a device."
        ),
    ] = "",
    gpus: Gpus = "",
    as_json: Json = False,
) -> None:
    """Measure what transfers cost engines that are busy, and what busy engines cost transfers, as one table.

    Loads come at random times, whatever becomes of earlier ones, to engines that are busy (loads) or have nothing else to do (alone); calm
    is as busy without loads. Each back end is measured in each of these ways in each round, in random order. The interval
    holds the true median with a probability of 95 % and takes six rounds. CPU and sleeps a load are what a thread of kvxfer's spends
    beyond calm; the engine's are what kvxfer's calls take there, of played engines only. The last rows are the times between the stages
    of a load (setting trace).
    """
    arrivals = OpenLoop(seconds, rate, tuple(tokens), 0)
    parts, before = [parsed(text, STOCK if model else ()) for text in backends], os.getloadavg()
    with ExitStack() as stack:
        if model:
            from kvxfer_bench.vllm.served import (
                served,
            )  # here, because it needs the connector, and the played form does not

            measures = stack.enter_context(served(backends, model, gpus, tokens, others, progress()))
        else:
            measures = {
                text: stack.enter_context(played({"backend": name, **settings}, others))
                for text, (name, settings) in zip(backends, parts, strict=True)
            }
        found = in_turns(measures, arrivals, rounds, progress())
    host = {
        "rate": rate,
        "others": others,
        "seconds": seconds,
        "load_average": [round(before[0], 2), round(os.getloadavg()[0], 2)],
    }
    rows = {name: {row.what: row for row in load_rows(found[name])} for name in measures}
    if as_json:
        for name, each in rows.items():
            for row in each.values():
                typer.echo(json.dumps({**host, "backend": name, **row._asdict()}))
        return
    typer.echo(json.dumps(host))
    whats = dict.fromkeys(what for each in rows.values() for what in each)
    typer.echo(
        tables(
            {"": what} | {name: each[what].words if what in each else "" for name, each in rows.items()}
            for what in whats
        )
    )
