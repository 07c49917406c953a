"""``kvxfer bench transfer``: moves a request's scattered blocks between two processes, checks them, and compares with a plain copy."""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer

from kvxfer.cli.host import check_memory
from kvxfer.cli.terminal import Say, progress
from kvxfer.config import Config, Integrity
from kvxfer.data.policy import default_staging
from kvxfer.errors import ConfigError
from kvxfer.settings import json_object
from kvxfer.transport import load
from kvxfer_bench.options import Backend, BackendOptions, Device, Json
from kvxfer_bench.transfer.engine import Pair, pair
from kvxfer_bench.transfer.shapes import MODELS, Model, Request, cache_devices


def measure(
    config: Config, device: str, tokens: int, model: str, repeat: int, integrity: Integrity, say: Say
) -> dict[str, Any]:
    """Run the benchmark, and its session part also with ``integrity``; ``say`` is told what is being measured.

    Returns:
        Figures with their unit in the key (GB means 1e9 bytes): medians of ``repeat`` rounds.
    """
    shape = MODELS[model]
    where = cache_devices(device)
    cache = shape.cache_blocks(tokens) * shape.page * shape.layers
    staging = "" if config.staging_bytes is None else f" with --staging-bytes {config.staging_bytes}"
    check_memory(where, cache + (config.staging_bytes or default_staging(where[0])), f"--tokens {tokens}{staging}")
    request = Request(shape, tokens)
    out: dict[str, Any] = {
        "backend": config.backend,
        "device": device,
        "devices": where,
        "model": model,
        "tokens": tokens,
        "kv_bytes": request.nbytes,
        "repeat": repeat,
        "blocks": len(request),
        "raw_copy_GB_per_s": _raw_copy(where, request.nbytes),
    }
    say(f"starting two processes, each with {request.blocks} blocks of {model}")
    with pair(config, shape, request.blocks, where) as both:
        say(f"moving {request.nbytes / 2**20:.0f} MiB with the back end alone")
        out |= _transport(both, request.src, request.dst, repeat)
        say("between two agents")
        out |= _session(both, request, repeat, integrity)
    # The same bytes as one run in one block: what the back end can do when nothing is scattered.
    say("with the back end alone, as one message")
    whole = Model(1, 1, out["kv_bytes"], 1)
    with pair(config, whole, 1, where) as both:
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
    both.expect(dst, src, "transport")
    seconds = statistics.median(rounds[2:])
    return {
        "verb": mode,
        "staged": bool(said["staged"]),
        "transport_ms": round(1e3 * seconds, 3),
        "transport_GB_per_s": round(said["bytes"] / seconds / 1e9, 3),
    }


def _session(both: Pair, request: Request, repeat: int, integrity: Integrity) -> dict[str, Any]:
    """Measure transfers between agents: those that are checked in turns with those that are not."""
    p, d = both.producer, both.consumer
    d("clear")
    ways: tuple[Integrity, ...] = ("off",) if integrity == "off" else ("off", integrity)
    sources = {way: p("open_agent", way) for way in ways}
    for way in ways:
        d("open_agent", way)
    p("offer", range(repeat + 2), request.src)
    time.sleep(0.05)  # fetch requests must find the transfers offered
    rounds = d("fetch", range(repeat + 2), request.dst, sources)
    both.expect(request.dst, request.src, "session")
    fetch = {way: statistics.median(r[way]["fetch_s"] for r in rounds[2:]) for way in ways}
    session = statistics.median(r["off"]["session_s"] for r in rounds[2:])
    first, nbytes = rounds[0]["off"]["fetch_s"], rounds[0]["off"]["bytes"]
    out: dict[str, Any] = {
        "first_contact_ms": round(1e3 * first, 3),
        "fetch_ms": round(1e3 * fetch["off"], 3),
        "session_ms": round(1e3 * session, 3),
        "session_GB_per_s": round(nbytes / session / 1e9, 3),
        "engine_thread_us": round(1e6 * statistics.median(r["off"]["call_s"] for r in rounds[2:]), 1),
    }
    if integrity != "off":
        out["integrity"] = integrity
        out["checked_fetch_ms"] = round(1e3 * fetch[integrity], 3)
        out["checked_to_unchecked"] = round(fetch["off"] / fetch[integrity], 3)
    return out


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
    backend: Backend = "tcp",
    device: Device = "cpu",
    tokens: Annotated[int, typer.Option(help="Length of the prompt, in tokens.", min=1)] = 1024,
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    repeat: Annotated[int, typer.Option(help="Rounds that count, after two that warm up.", min=1)] = 5,
    options: BackendOptions = "{}",
    staging_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Staging memory on each side, in bytes; as much as engines take by default."),
    ] = None,
    integrity: Annotated[
        str, typer.Option(help="Also measure transfers that are checked: sample or full, or off for none.")
    ] = "off",
    as_json: Json = False,
) -> None:
    """Move a request's scattered blocks between two processes, check them, and print how fast they were moved.

    Names of figures: transport is the back end alone, session is a whole transfer between two agents, raw is a plain
    copy. GB are 1e9 bytes.
    """
    if model not in MODELS:
        raise ConfigError(f"unknown --model {model!r}; the shapes are {', '.join(MODELS)}")
    if integrity not in get_args(Integrity):
        raise ConfigError(f"--integrity must be one of {', '.join(get_args(Integrity))}, not {integrity!r}")
    load(backend)  # which `auto` is not: the figures are of one back end
    chosen = json_object(options, "--options")
    config = Config(backend=backend, backend_options=chosen, staging_bytes=staging_bytes)
    out = measure(config, device, tokens, model, repeat, cast(Integrity, integrity), progress())
    if as_json:
        typer.echo(json.dumps(out))
        return
    for key, value in out.items():
        typer.echo(f"{key:32} {value}")
