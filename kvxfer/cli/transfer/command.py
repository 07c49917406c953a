"""``kvxfer bench transfer``: moves a request's scattered blocks between two processes, checks them, and compares with raw ceilings."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer

from kvxfer.cli.progress import Say, progress, silent
from kvxfer.cli.transfer.pair import Pair, Sessions, cache_devices, check_room, pair
from kvxfer.cli.transfer.shapes import MODELS, Memory, Model, Request
from kvxfer.config import Integrity
from kvxfer.errors import ConfigError
from kvxfer.identity import Source
from kvxfer.settings import json_object

__all__ = ["measure", "measure_elastic", "transfer"]

PAUSE_S = 0.02


def measure(
    backend: str,
    options: dict[str, Any],
    device: str,
    tokens: int,
    model: str,
    repeat: int,
    staging_bytes: int | None,
    integrity: Integrity = "off",
    step_ms: float = 0.0,
    at_once: int = 1,
    say: Say = silent,
) -> dict[str, Any]:
    """Run the benchmark, and its session part also with ``integrity``; ``say`` is told what is being measured.

    If ``at_once`` is more than 1, also fetch as many requests at once, of ``tokens`` each.

    Returns:
        Figures with their unit in the key (GB means 1e9 bytes): medians of ``repeat`` rounds, back to back or
        (``after_pause``) 20 ms apart.
    """
    shape = MODELS[model]
    where = cache_devices(device)
    check_room(where, shape, tokens * at_once, staging_bytes)
    requests = [Request(shape, tokens, number, at_once) for number in range(at_once)]
    request = requests[0]
    out = _asked(backend, device, where, model, tokens, request, repeat) | {
        "blocks": len(request),
        **({"step_ms": step_ms} if step_ms else {}),
        "raw_copy_GB_per_s": _raw_copy(where, request.nbytes),
    }
    say(f"starting two processes, each with {request.blocks} blocks of {model}")
    with pair(backend, options, shape, request.blocks, where, staging_bytes, step_ms=step_ms) as both:
        say(f"moving {request.nbytes / 2**20:.0f} MiB with the back end alone")
        out |= _transport(both, request.src, request.dst, repeat)
        say("with its library alone")
        out |= _library(both, request.src, request.dst, repeat, request.nbytes)
        say("between two agents")
        out |= _session(both, requests, repeat, integrity)
    # The same bytes as one run in one block: what the back end can do when nothing is scattered.
    say("with the back end alone, as one message")
    whole = Model(1, 1, out["kv_bytes"], 1)
    with pair(backend, options, whole, 1, where, staging_bytes) as both:
        one = _transport(both, np.zeros(1, np.int64), np.zeros(1, np.int64), repeat)
    out["one_message_GB_per_s"] = one["transport_GB_per_s"]
    for figure in ("transport", "session", "one_message"):
        for ceiling in ("raw_copy", "one_message", "raw_runs", "raw_one_message"):
            if figure != ceiling and f"{ceiling}_GB_per_s" in out:
                ratio = out[f"{figure}_GB_per_s"] / out[f"{ceiling}_GB_per_s"]
                out[f"{figure}_to_{ceiling}"] = round(ratio, 3)
    return out


def measure_elastic(
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
    out = _asked(backend, device, where, model, tokens, request, repeat)
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


def _asked(
    backend: str, device: str, where: tuple[str, str], model: str, tokens: int, request: Request, repeat: int
) -> dict[str, Any]:
    """Return what was asked for, which both kinds of measurement report."""
    return {
        "backend": backend,
        "device": device,
        "devices": where,
        "model": model,
        "tokens": tokens,
        "kv_bytes": request.nbytes,
        "repeat": repeat,
    }


def _transport(both: Pair, src: Any, dst: Any, repeat: int) -> dict[str, Any]:
    mode = both.connect()
    both.consumer("clear")
    rounds, said = both.move(src, dst, repeat + 2)
    rested, _ = both.move(src, dst, repeat, PAUSE_S)
    both.expect(dst, src, "transport")
    seconds = statistics.median(rounds[2:])
    return {
        "verb": mode,
        "staged": bool(said["staged"]),
        "transport_ms": round(1e3 * seconds, 3),
        "transport_GB_per_s": round(said["bytes"] / seconds / 1e9, 3),
        "transport_after_pause_ms": round(1e3 * statistics.median(rested), 3),
    }


def _library(both: Pair, src: Any, dst: Any, repeat: int, nbytes: int) -> dict[str, Any]:
    """Measure the back end's library by itself, in turns with a message or descriptor for each run and with one for all.

    If the library has steps of its own, also return their mean and their 99th percentile, as its own benchmark does.
    """
    two_sided = both.connect_raw()
    if two_sided is None:
        return {}
    both.consumer("clear")
    ways = both.move_raw(src, dst, (False, True), two_sided, repeat + 2)
    both.expect(dst, src, "raw library's")
    out: dict[str, Any] = {"raw_runs": ways[1].runs}
    for name, way in zip(("raw_one_message", "raw_runs"), ways, strict=True):
        out[f"{name}_GB_per_s"] = round(nbytes / statistics.median(way.seconds[2:]) / 1e9, 3)
        for step, seconds in way.steps.items():
            out[f"{name}_{step}_us"] = round(1e6 * statistics.fmean(seconds[2:]), 1)
            out[f"{name}_{step}_p99_us"] = round(1e6 * float(np.percentile(seconds[2:], 99)), 1)
    return out


def _session(both: Pair, requests: list[Request], repeat: int, integrity: Integrity) -> dict[str, Any]:
    """Measure transfers between agents: of one request, those that are checked in turns with those that are not; then all at once."""
    p, d = both.producer, both.consumer
    src, dst = requests[0].src, requests[0].dst
    d("clear")
    ways: tuple[Integrity, ...] = ("off",) if integrity == "off" else ("off", integrity)
    sources = {way: p("open_agent", way) for way in ways}
    for way in ways:
        d("open_agent", way)
    numbers, rested = range(repeat + 2), range(repeat + 2, 2 * repeat + 2)
    p("offer", [*numbers, *rested], src)
    time.sleep(0.05)  # fetch requests must find the transfers offered
    rounds = d("fetch", numbers, dst, sources, 0.0)
    after_pause = d("fetch", rested, dst, sources, PAUSE_S)
    both.expect(dst, src, "session")
    fetch = {way: statistics.median(r[way]["fetch_s"] for r in rounds[2:]) for way in ways}
    session = statistics.median(r["off"]["session_s"] for r in rounds[2:])
    first, nbytes = rounds[0]["off"]["fetch_s"], rounds[0]["off"]["bytes"]
    out: dict[str, Any] = {
        "first_contact_ms": round(1e3 * first, 3),
        "fetch_ms": round(1e3 * fetch["off"], 3),
        "session_ms": round(1e3 * session, 3),
        "session_GB_per_s": round(nbytes / session / 1e9, 3),
        "session_after_pause_ms": round(1e3 * statistics.median(r["off"]["session_s"] for r in after_pause), 3),
        "engine_thread_us": round(1e6 * statistics.median(r["off"]["call_s"] for r in rounds[2:]), 1),
        "cost": d("cost") or p("cost"),  # the producer knows it where it writes
    }
    if integrity != "off":
        out["integrity"] = integrity
        out["checked_fetch_ms"] = round(1e3 * fetch[integrity], 3)
        out["checked_to_unchecked"] = round(fetch["off"] / fetch[integrity], 3)
    if len(requests) > 1:
        out |= _at_once(both, requests, sources["off"], range(2 * repeat + 2, 3 * repeat + 4))
    return out


def _at_once(both: Pair, requests: list[Request], source: Source, rounds: Sequence[int]) -> dict[str, Any]:
    """Measure all requests at once, as often as there are ``rounds``, of which two warm up."""
    p, d = both.producer, both.consumer
    d("clear")
    took = []
    for r in rounds:
        numbers = [r * len(requests) + i for i in range(len(requests))]
        for number, request in zip(numbers, requests, strict=True):
            p("offer", [number], request.src)
        time.sleep(0.05)  # as above
        took.append(d("fetch_at_once", numbers, [request.dst for request in requests], source))
    for request in requests:
        both.expect(request.dst, request.src, "session")
    seconds = statistics.median(took[2:])
    return {
        "at_once": len(requests),
        "at_once_ms": round(1e3 * seconds, 3),
        "at_once_GB_per_s": round(sum(request.nbytes for request in requests) / seconds / 1e9, 3),
    }


def _raw_copy(where: tuple[str, str], nbytes: int) -> float:
    """Measure one contiguous copy of the same size: memcpy, or a peer copy between the two GPUs. Return GB/s."""
    times = []
    if where[0] == "cpu":
        a, b = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        for _ in range(5):
            begun = time.perf_counter()
            np.copyto(b, a)
            times.append(time.perf_counter() - begun)
    else:
        import torch

        a_, b_ = (torch.zeros(nbytes, dtype=torch.uint8, device=x) for x in where)
        for _ in range(7):
            for x in set(where):
                torch.cuda.synchronize(x)
            begun = time.perf_counter()
            b_.copy_(a_)
            for x in set(where):
                torch.cuda.synchronize(x)
            times.append(time.perf_counter() - begun)
        del a_, b_
        torch.cuda.empty_cache()
    return round(nbytes / statistics.median(times[1:]) / 1e9, 2)


def transfer(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "tcp",
    device: Annotated[str, typer.Option(help="Memory of both caches: cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(help="Length of the prompt, in tokens.", min=1)] = 1024,
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    repeat: Annotated[int, typer.Option(help="Rounds that count, after two that warm up.", min=1)] = 5,
    options: Annotated[str, typer.Option(help="Options of the back end (backend_options), as a JSON object.")] = "{}",
    staging_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Staging memory on each side, in bytes; as much as engines take by default."),
    ] = None,
    integrity: Annotated[
        str, typer.Option(help="Also measure transfers that are checked: sample or full, or off for none.")
    ] = "off",
    elastic: Annotated[
        bool, typer.Option("--elastic", help="Instead compare elastic caches with plain ones, in turns.")
    ] = False,
    step_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Python work that each engine does in every step meanwhile, in milliseconds; 0 for no steps."
        ),
    ] = 0.0,
    at_once: Annotated[
        int, typer.Option(min=1, help="Also fetch this many requests at once, each of --tokens tokens; 1 for none.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Move a request's scattered blocks between two processes, check them, and print how fast they were moved.

    Names of figures: transport is the back end alone, session is a whole transfer between two agents, raw is the back end's
    library by itself or a plain copy. GB are 1e9 bytes.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(MODELS)}")
    if integrity not in get_args(Integrity):
        raise ConfigError(f"--integrity must be one of {', '.join(get_args(Integrity))}, not {integrity!r}")
    chosen = json_object(options, "--options")
    given = backend, chosen, device, tokens, model, repeat, staging_bytes
    out = (
        measure_elastic(*given)
        if elastic
        else measure(*given, cast(Integrity, integrity), step_ms, at_once, progress())
    )
    if as_json:
        typer.echo(json.dumps(out))
        return
    for key, value in out.items():
        typer.echo(f"{key:32} {value}")
