"""``kvxfer bench transfer``: moves a request's scattered blocks between two processes, checks them, and compares with a plain copy."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer

from kvxfer.cli.terminal import Say, progress, silent
from kvxfer.config import Integrity
from kvxfer.errors import ConfigError
from kvxfer.identity import Source
from kvxfer.settings import json_object
from kvxfer_bench.transfer.pair import Pair, cache_devices, check_room, pair
from kvxfer_bench.transfer.shapes import MODELS, Model, Request

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
    out: dict[str, Any] = {
        "backend": backend,
        "device": device,
        "devices": where,
        "model": model,
        "tokens": tokens,
        "kv_bytes": request.nbytes,
        "repeat": repeat,
        "blocks": len(request),
        **({"step_ms": step_ms} if step_ms else {}),
        "raw_copy_GB_per_s": _raw_copy(where, request.nbytes),
    }
    say(f"starting two processes, each with {request.blocks} blocks of {model}")
    with pair(backend, options, shape, request.blocks, where, staging_bytes, step_ms=step_ms) as both:
        say(f"moving {request.nbytes / 2**20:.0f} MiB with the back end alone")
        out |= _transport(both, request.src, request.dst, repeat)
        say("between two agents")
        out |= _session(both, requests, repeat, integrity)
    # The same bytes as one run in one block: what the back end can do when nothing is scattered.
    say("with the back end alone, as one message")
    whole = Model(1, 1, out["kv_bytes"], 1)
    with pair(backend, options, whole, 1, where, staging_bytes) as both:
        one = _transport(both, np.zeros(1, np.int64), np.zeros(1, np.int64), repeat)
    out["one_message_GB_per_s"] = one["transport_GB_per_s"]
    for figure in ("transport", "session", "one_message"):
        for other in ("raw_copy", "one_message"):
            if figure != other:
                ratio = out[f"{figure}_GB_per_s"] / out[f"{other}_GB_per_s"]
                out[f"{figure}_to_{other}"] = round(ratio, 3)
    return out


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
    step_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Python work that each engine does in every step during that, in milliseconds; 0 for no steps."
        ),
    ] = 0.0,
    at_once: Annotated[
        int, typer.Option(min=1, help="Also fetch this many requests in parallel, each of --tokens tokens; 1 for none.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Move a request's scattered blocks between two processes, check them, and print how fast they were moved.

    Names of figures: transport is the back end alone, session is a whole transfer between two agents, raw is a plain
    copy. GB are 1e9 bytes.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(MODELS)}")
    if integrity not in get_args(Integrity):
        raise ConfigError(f"--integrity must be one of {', '.join(get_args(Integrity))}, not {integrity!r}")
    chosen = json_object(options, "--options")
    checked = cast(Integrity, integrity)
    out = measure(backend, chosen, device, tokens, model, repeat, staging_bytes, checked, step_ms, at_once, progress())
    if as_json:
        typer.echo(json.dumps(out))
        return
    for key, value in out.items():
        typer.echo(f"{key:32} {value}")
