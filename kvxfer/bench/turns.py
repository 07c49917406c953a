"""``kvxfer bench turns``: one back end with different options and its library by itself, in turns.

It shows what a change of options does on a machine whose speed changes from minute to minute.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from kvxfer.bench.pair import cache_devices, pair
from kvxfer.bench.shapes import MODELS, Request
from kvxfer.errors import ConfigError

__all__ = ["measure", "turns"]


def measure(
    backend: str, options: list[dict[str, Any]], device: str, model: str, tokens: int, rounds: int, staging_bytes: int
) -> Iterator[dict[str, Any]]:
    """Move the same scattered blocks once a round with each set of options, and once with the library by itself.

    The library uses a message or descriptor for each run.

    Yields:
        A row for each: GB/s of the median round and of the one at the upper quartile, and the ratios to the library
        (for the median, of the rounds' own ratios).
    """
    shape = MODELS[model]
    request = Request(shape, tokens)
    src, dst, nbytes = request.src, request.dst, request.nbytes
    with ExitStack() as stack:
        where = cache_devices(device)
        made = (pair(backend, o, shape, request.blocks, where, staging_bytes) for o in options)
        pairs = [stack.enter_context(each) for each in made]
        for both in pairs:
            both.connect()
        two_sided = pairs[0].connect_raw()
        raw: list[float] = []
        own: list[list[float]] = [[] for _ in pairs]  # seconds
        for _ in range(rounds + 2):
            if two_sided is not None:
                raw += pairs[0].move_raw(src, dst, [True], two_sided)[0][0]
            for both, seconds in zip(pairs, own, strict=True):
                seconds += both.move(src, dst)[0]
    raw = raw[2:]
    if raw:
        yield {"library": backend, **_rates(raw, nbytes)}
    for chosen, seconds in zip(options, own, strict=True):
        row = {"options": chosen, **_rates(seconds[2:], nbytes)}
        if raw:
            row["to_library"] = round(statistics.median(r / s for r, s in zip(raw, seconds[2:], strict=True)), 2)
            row["upper_quartile_to_library"] = round(_quartile(raw) / _quartile(seconds[2:]), 2)
        yield row


def _rates(seconds: list[float], nbytes: int) -> dict[str, float]:
    return {
        "GB_per_s": round(nbytes / statistics.median(seconds) / 1e9, 4),
        "upper_quartile_GB_per_s": round(nbytes / _quartile(seconds) / 1e9, 4),
    }


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def turns(
    backend: Annotated[str, typer.Argument(help="Name of a back end.")],
    options: Annotated[list[str], typer.Argument(help="backend_options, a JSON object for each variant.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the request.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the median counts.")] = 60,
    staging_bytes: Annotated[int, typer.Option(min=1, help="Staging memory of each side.")] = 64 << 20,
) -> None:
    """Compare options of one back end round by round, and with its library; a JSON object a line.

    Nothing is checked here but that all transfers end; `kvxfer bench transfer` compares bytes.
    """
    if model not in MODELS or device not in ("cpu", "cuda"):
        raise ConfigError(f"model {model!r} on {device!r}: models are {', '.join(MODELS)}, devices cpu and cuda")
    try:
        variants = [json.loads(each) for each in options]
    except ValueError as error:
        raise ConfigError(f"options must be JSON objects, as in '{{\"threads\": 2}}': {error}") from None
    for row in measure(backend, variants, device, model, tokens, rounds, staging_bytes):
        typer.echo(json.dumps(row))
