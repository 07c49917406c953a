"""``kvxfer bench elastic``: transfers between elastic caches, in turns with plain ones."""

from __future__ import annotations

import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer_bench.sessions import Sessions
from kvxfer_bench.transfer.pair import Pair, cache_devices, check_room, pair
from kvxfer_bench.transfer.shapes import MODELS, Memory, Request

__all__ = ["elastic", "measure"]


def measure(
    backend: str, options: dict[str, Any], device: str, tokens: int, model: str, repeat: int, staging_bytes: int | None
) -> dict[str, Any]:
    """Move a request between two elastic caches and, in turns, between two plain ones.

    On a GPU also between two plain ones that are declared elastic, which shows the cost of staging without mapped pages.

    Returns:
        For each kind of memory (``elastic_``, ``declared_``, ``plain_``) whether the bytes were staged and the GB/s of the median
        round; and for elastic memory the median of each round's ratio to each of the others.
    """
    shape = MODELS[model]
    where = cache_devices(device)
    ways: list[Memory] = ["elastic", "plain"] if device == "cpu" else ["elastic", "declared", "plain"]
    check_room(where, shape, tokens, staging_bytes, 2 * len(ways))
    request = Request(shape, tokens)
    seconds: dict[tuple[str, str], list[float]] = {}
    out: dict[str, Any] = {
        "backend": backend,
        "device": device,
        "devices": where,
        "model": model,
        "tokens": tokens,
        "kv_bytes": request.nbytes,
        "repeat": repeat,
    }
    with ExitStack() as stack:

        def start(memory: Memory) -> Pair:
            return stack.enter_context(pair(backend, options, shape, request.blocks, where, staging_bytes, memory))

        with ThreadPoolExecutor() as pool:  # each takes seconds to import torch
            started = list(pool.map(start, [*ways, *ways]))
        pairs = dict(zip(ways, started[: len(ways)], strict=True))
        sessions = {way: Sessions(both, request) for way, both in zip(ways, started[len(ways) :], strict=True)}
        for both in pairs.values():
            both.connect()
            both.consumer("clear")
        for number in range(repeat + 2):
            for way, both in pairs.items():
                took, said = both.move(request.src, request.dst)
                out[f"{way}_staged"] = bool(said["staged"])
                seconds.setdefault((way, "transport"), []).extend(took)
            for way, fetches in sessions.items():
                seconds.setdefault((way, "session"), []).append(fetches.fetch(number))
        for both in pairs.values():
            both.expect(request.dst, request.src, "transport")
        for fetches in sessions.values():
            fetches.expect("session")
    for (memory, what), took in seconds.items():
        out[f"{memory}_{what}_GB_per_s"] = round(request.nbytes / statistics.median(took[2:]) / 1e9, 3)
    for other in ways[1:]:
        for what in ("transport", "session"):
            rounds = zip(seconds[other, what][2:], seconds["elastic", what][2:], strict=True)
            out[f"elastic_to_{other}_{what}"] = round(statistics.median(one / elastic for one, elastic in rounds), 3)
    return out


def elastic(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    device: Annotated[str, typer.Option(help="Memory of all caches: cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(help="Length of the prompt, in tokens.", min=1)] = 1024,
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    repeat: Annotated[int, typer.Option(help="Rounds that count, after two that warm up.", min=1)] = 5,
    options: Annotated[str, typer.Option(help="Options of the back end (backend_options), as a JSON object.")] = "{}",
    staging_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Staging memory on each side, in bytes; as much as engines take by default."),
    ] = None,
) -> None:
    """Compare elastic caches with plain ones, round by round: the back end alone, and transfers between agents.

    Prints one JSON object. It checks the bytes.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(MODELS)}")
    chosen = json_object(options, "--options")
    typer.echo(json.dumps(measure(backend, chosen, device, tokens, model, repeat, staging_bytes)))
