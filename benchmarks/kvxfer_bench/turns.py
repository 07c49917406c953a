"""``kvxfer bench turns``: one back end with different options, transfers between agents, and its library by itself, in turns.

It shows the effect of options, and the overhead of a back end, even on a machine whose speed changes from minute to minute.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer

from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer_bench.library import CeilingEngine, LibraryPair
from kvxfer_bench.raw import GROUP
from kvxfer_bench.sessions import Sessions
from kvxfer_bench.transfer.pair import Pair, cache_devices, check_room, pair
from kvxfer_bench.transfer.shapes import MODELS, Request

__all__ = ["measure", "turns"]

WARM = 2
"""Rounds that are not counted."""


def measure(
    backend: str,
    options: list[dict[str, Any]],
    device: str,
    model: str,
    tokens: int,
    rounds: int,
    staging_bytes: int | None,
    sessions: bool = True,
) -> Iterator[dict[str, Any]]:
    """Move the same scattered blocks once per round with each set of options, and with the library by itself.

    The library first uses a message or descriptor for each run, then one for the same number of contiguous bytes. With ``sessions``,
    each round also has a fetch between two agents for each set of options.

    Yields:
        A row for each: milliseconds and GB/s of the median round, GB/s at the upper quartile, and the ratios to both ways of using
        the library (at the median, the median of each round's ratio).
    """
    shape = MODELS[model]
    where = cache_devices(device)
    check_room(where, shape, tokens, staging_bytes, len(options) * (1 + sessions))
    request = Request(shape, tokens)
    seconds: dict[tuple[str, int], list[float]] = {}

    def note(what: str, which: int, took: list[float]) -> None:
        seconds.setdefault((what, which), []).extend(took)

    with ExitStack() as stack:

        def start(chosen: dict[str, Any]) -> Pair:
            both = pair(backend, chosen, shape, request.blocks, where, staging_bytes, engine=CeilingEngine)
            return stack.enter_context(both)

        pairs = [start(chosen) for chosen in options]
        for both in pairs:
            both.connect()
        library = LibraryPair(pairs[0]) if entry_points(group=GROUP, name=backend) else None
        agents = [Sessions(start(chosen), request) for chosen in options] if sessions else []
        for number in range(rounds + WARM):
            if library is not None:
                runs, one = library.move(request.src, request.dst, (True, False))
                note("library", 0, runs.seconds)
                note("library in one message", 0, one.seconds)
            for i, both in enumerate(pairs):
                note("transport", i, both.move(request.src, request.dst)[0])
            for i, fetches in enumerate(agents):
                note("session", i, [fetches.fetch(number)])
    counted = {key: took[WARM:] for key, took in seconds.items()}
    ceilings = {"to_library": "library", "to_one_message": "library in one message"}
    for (what, which), took in counted.items():
        chosen = {} if what in ceilings.values() else {"options": options[which]}
        row: dict[str, Any] = {"what": what, **chosen, **_rates(took, request.nbytes)}
        for ratio, ceiling in ceilings.items():
            if chosen and (ceiling, 0) in counted:
                theirs = counted[ceiling, 0]
                row[ratio] = round(statistics.median(c / own for c, own in zip(theirs, took, strict=True)), 2)
                row[f"upper_quartile_{ratio}"] = round(_quartile(theirs) / _quartile(took), 2)
        yield row


def _rates(seconds: list[float], nbytes: int) -> dict[str, float]:
    return {
        "ms": round(1e3 * statistics.median(seconds), 3),
        "GB_per_s": round(nbytes / statistics.median(seconds) / 1e9, 4),
        "upper_quartile_GB_per_s": round(nbytes / _quartile(seconds) / 1e9, 4),
    }


def _quartile(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]


def turns(
    backend: Annotated[str, typer.Argument(help="Back end to measure.")],
    options: Annotated[list[str], typer.Argument(help="backend_options of each variant to measure, as JSON objects.")],
    device: Annotated[str, typer.Option(help="Memory of the caches: cpu or cuda.")] = "cpu",
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="Length of the request, in tokens.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 60,
    staging_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Staging memory on each side, in bytes; as much as engines take by default."),
    ] = None,
) -> None:
    """Compare options of one back end round by round: the back end alone, transfers between agents, and its library.

    Prints one JSON object per line. It checks only that all transfers end; `kvxfer bench transfer` also compares bytes.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(MODELS)}")
    variants = [json_object(each, "each of OPTIONS") for each in options]
    for row in measure(backend, variants, device, model, tokens, rounds, staging_bytes):
        typer.echo(json.dumps(row))
