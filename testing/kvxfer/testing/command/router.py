"""Tests a router against the contract of routers, for `kvxfer conformance --router`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import NoReturn

import typer

from kvxfer.testing.router import CASES, Deployment, HttpServer, NoServerError, RouterResult, Texts, check


def try_router(
    router: str,
    plain: str,
    prefill: Sequence[str],
    decode: Sequence[str],
    within: float,
    only: str,
    fail_fast: bool,
    as_json: bool,
) -> None:
    """Send the table of requests through a router; print a line for each case, or one JSON object. Exits like ``conformance``."""
    chosen = [case for case in CASES if only in case.name]
    if not chosen:
        raise typer.BadParameter(f"no case has {only!r} in its name", param_hint="--only")
    results: list[RouterResult] = []
    try:
        deployment = _deployment(router, plain, prefill, decode, within)
        for case in chosen:
            results.append(result := check(case, deployment, Texts()))
            if not as_json:
                what = result.said or f"{case.what}; {result.nbytes / 1e6:.1f} MB moved"
                typer.echo(f"{result.outcome:8} {case.name:24} {result.seconds:5.1f} s  {what}")
            if fail_fast and result.outcome == "broken":
                break
    except NoServerError as e:
        cannot(str(e))
    found = Counter(result.outcome for result in results)
    if as_json:
        typer.echo(json.dumps({"router": router, "kept": not found["broken"], "cases": [asdict(r) for r in results]}))
    else:
        typer.echo(
            f"router {router}: {found['kept']} cases kept, {found['broken']} broken, {found['left out']} left out"
        )
    if found["broken"]:
        raise typer.Exit(1)


def _deployment(router: str, plain: str, prefill: Sequence[str], decode: Sequence[str], within: float) -> Deployment:
    """Return the servers, each of which answers as what it is said to be.

    Raises:
        NoServerError: One does not.
    """
    servers = (
        HttpServer(router),
        HttpServer(plain),
        [HttpServer(url) for url in prefill],
        [HttpServer(url) for url in decode],
    )
    engines = [*servers[2], *servers[3]]
    models = {server.model() for server in (servers[1], *engines)}
    if len(models) > 1:
        raise NoServerError(f"the servers have different models: {', '.join(sorted(models))}")
    for server in engines:
        server.metrics()
    (model,) = models
    servers[0].reach()
    return Deployment(*servers, model, within)


def cannot(why: str) -> NoReturn:
    """Say why nothing can be tested, and exit as ``conformance`` does then."""
    typer.echo(f"kvxfer: {why}", err=True)
    raise typer.Exit(3)
