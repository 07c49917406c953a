"""``kvxfer bench transfer``: a request's scattered blocks between two processes, bytes checked, beside raw ceilings."""

from __future__ import annotations

import json
import multiprocessing as mp
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, cast, get_args

import numpy as np
import typer

from kvxfer.bench.party import Party, Setup
from kvxfer.bench.remote import Remote
from kvxfer.bench.shapes import MODELS, Model
from kvxfer.config import Integrity
from kvxfer.errors import ConfigError, KvxferError

__all__ = ["measure", "transfer"]


def measure(
    backend: str, options: dict[str, Any], device: str, tokens: int, model: str, repeat: int, staging_bytes: int,
    integrity: Integrity = "off",
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark, and the session's part also with ``integrity``; every figure with its unit in the key, GB
    meaning 1e9 bytes, medians of ``repeat`` rounds."""
    shape = MODELS[model]
    need = -(-tokens // shape.block_tokens)
    blocks = need + need // 4 + 1
    devices = _devices(device)
    rng = np.random.default_rng(0)
    src, dst = (rng.permutation(blocks)[:need].astype(np.int64) for _ in range(2))
    out: dict[str, Any] = {
        "backend": backend, "device": device, "devices": devices, "model": model, "tokens": tokens,
        "kv_bytes": need * shape.page * shape.layers, "blocks": need, "repeat": repeat,
        "raw_copy_GB_per_s": _raw_copy(devices, need * shape.page * shape.layers),
    }  # fmt: skip
    with _parties(backend, options, shape, blocks, devices, staging_bytes) as (p, d):
        out |= _transport(p, d, src, dst, repeat)
        out |= _library(p, d, src, dst, repeat, out["kv_bytes"])
        out |= _session(p, d, src, dst, repeat, integrity)
    # The same bytes as one run in one block: what the back end does when nothing is scattered.
    whole = Model(1, 1, out["kv_bytes"], 1)
    with _parties(backend, options, whole, 1, devices, staging_bytes) as (p, d):
        one = _transport(p, d, np.zeros(1, np.int64), np.zeros(1, np.int64), repeat)
    out["one_message_GB_per_s"] = one["transport_GB_per_s"]
    for figure in ("transport", "session", "one_message"):
        for ceiling in ("raw_copy", "one_message", "raw_runs", "raw_one_message"):
            if figure != ceiling and f"{ceiling}_GB_per_s" in out:
                ratio = out[f"{figure}_GB_per_s"] / out[f"{ceiling}_GB_per_s"]
                out[f"{figure}_to_{ceiling}"] = round(ratio, 3)
    return out


@contextmanager
def _parties(
    backend: str, options: dict[str, Any], model: Model, blocks: int, devices: tuple[str, str], staging_bytes: int
) -> Iterator[tuple[Remote, Remote]]:
    with ExitStack() as stack:
        made = []
        for role, where in zip(("producer", "consumer"), devices, strict=True):
            made.append(Remote(role, Party, Setup(role, backend, options, model, blocks, where, staging_bytes)))
            stack.callback(made[-1].close)
        yield made[0], made[1]


def _transport(p: Remote, d: Remote, src: Any, dst: Any, repeat: int) -> dict[str, Any]:
    ends = p("open_mover"), d("open_mover")
    p.send("connect", ends[1])
    d("connect", ends[0])
    mode = p.get()
    caches = p("cache"), d("cache")
    d("clear")
    seconds = []
    for i in range(repeat + 2):
        one, two = mp.get_context("spawn").Pipe()
        p.send("move", src, dst, caches[1], one)
        d.send("move", src, dst, caches[0], two)
        ours, theirs = _both(p, d)
        one.close()
        two.close()
        if i >= 2:
            seconds.append(max(ours["done"], theirs["done"]) - max(ours["begun"], theirs["begun"]))
    _expect(d("matches", dst, src), "transport")
    nbytes = ours["bytes"]
    return {
        "verb": mode, "staged": bool(ours["staged"]),
        "transport_ms": round(1e3 * statistics.median(seconds), 3),
        "transport_GB_per_s": round(nbytes / statistics.median(seconds) / 1e9, 3),
    }  # fmt: skip


def _library(p: Remote, d: Remote, src: Any, dst: Any, repeat: int, nbytes: int) -> dict[str, Any]:
    """The back end's library by itself, with a message or descriptor a run and, in turn, with one for all bytes."""
    theirs, ours = d("open_raw"), p("open_raw")
    if ours is None or theirs is None:
        return {}
    caches = p("cache"), d("cache")
    p.send("connect_raw", theirs)
    d("connect_raw", ours)
    both = p.get()
    d("clear")
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for i in range(repeat + 2):
        for scattered in (False, True):
            if both:
                p.send("move_raw", src, dst, caches[1], scattered)
            d.send("move_raw", src, dst, caches[0], scattered)
            sides = _both(p, d) if both else (d.get(),)
            if i >= 2:
                seconds[scattered].append(max(s["done"] for s in sides) - max(s["begun"] for s in sides))
            if scattered and i == 0:
                _expect(d("matches", dst, src), "raw library's")
                runs = sides[-1]["runs"]
    one, many = (nbytes / statistics.median(seconds[scattered]) / 1e9 for scattered in (False, True))
    return {"raw_runs": runs, "raw_runs_GB_per_s": round(many, 3), "raw_one_message_GB_per_s": round(one, 3)}


def _session(p: Remote, d: Remote, src: Any, dst: Any, repeat: int, integrity: Integrity) -> dict[str, Any]:
    """Transfers through agents; those that are checked in turn with others that are not."""
    d("clear")
    ways: tuple[Integrity, ...] = ("off",) if integrity == "off" else ("off", integrity)
    sources = {way: p("open_agent", way) for way in ways}
    rounds: dict[Integrity, list[dict[str, float]]] = {way: [] for way in ways}
    for way in ways:
        d("open_agent", way)
    for i in range(repeat + 2):
        for way in ways:
            p("offer", way, i, src)
            time.sleep(0.05)  # the want must find it offered
            rounds[way].append(d("fetch", way, i, dst, sources[way]))
            p("settle", way)
            d("settle", way)
    _expect(d("matches", dst, src), "session")
    fetch = {way: statistics.median(r["fetch_s"] for r in rounds[way][2:]) for way in ways}
    session = statistics.median(r["session_s"] for r in rounds["off"][2:])
    first, nbytes = rounds["off"][0]["fetch_s"], rounds["off"][0]["bytes"]
    out: dict[str, Any] = {
        "first_contact_ms": round(1e3 * first, 3),
        "fetch_ms": round(1e3 * fetch["off"], 3),
        "session_ms": round(1e3 * session, 3),
        "session_GB_per_s": round(nbytes / session / 1e9, 3),
        "engine_thread_us": round(1e6 * statistics.median(r["call_s"] for r in rounds["off"][2:]), 1),
    }
    if integrity != "off":
        out["integrity"] = integrity
        out["checked_fetch_ms"] = round(1e3 * fetch[integrity], 3)
        out["checked_to_unchecked"] = round(fetch["off"] / fetch[integrity], 3)
    return out


def _both(p: Remote, d: Remote) -> tuple[Any, Any]:
    """Both answers; when both fail, both reasons."""
    try:
        ours = p.get()
    except KvxferError as first:
        try:
            d.get()
        except KvxferError as second:
            raise KvxferError(f"{first}; {second}") from None
        raise
    return ours, d.get()


def _expect(right: bool, what: str) -> None:
    if not right:
        raise KvxferError(f"the {what} run delivered wrong bytes")


def _devices(device: str) -> tuple[str, str]:
    if device == "cpu":
        return "cpu", "cpu"
    import torch

    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here")
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


def _raw_copy(devices: tuple[str, str], nbytes: int) -> float:
    """One plain contiguous copy of as many bytes: memcpy, or the peer copy between the two GPUs."""
    times = []
    if devices[0] == "cpu":
        a, b = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        for _ in range(5):
            begun = time.perf_counter()
            np.copyto(b, a)
            times.append(time.perf_counter() - begun)
    else:
        import torch

        a_, b_ = (torch.zeros(nbytes, dtype=torch.uint8, device=x) for x in devices)
        for _ in range(7):
            for x in set(devices):
                torch.cuda.synchronize(x)
            begun = time.perf_counter()
            b_.copy_(a_)
            for x in set(devices):
                torch.cuda.synchronize(x)
            times.append(time.perf_counter() - begun)
        del a_, b_
        torch.cuda.empty_cache()
    return round(nbytes / statistics.median(times[1:]) / 1e9, 2)


def transfer(
    backend: Annotated[str, typer.Option(help="Back end that moves the KV.")] = "zmq",
    device: Annotated[str, typer.Option(help="Memory of both caches: cpu or cuda.")] = "cpu",
    tokens: Annotated[int, typer.Option(help="Prompt length.", min=1)] = 1024,
    model: Annotated[str, typer.Option(help=f"Shape of the cache: {', '.join(MODELS)}.")] = "llama-3-8b",
    repeat: Annotated[int, typer.Option(help="Rounds that count; two more warm up.", min=1)] = 5,
    options: Annotated[str, typer.Option(help="backend_options as a JSON object.")] = "{}",
    staging_bytes: Annotated[int, typer.Option(help="Staging memory on each side.")] = 64 << 20,
    integrity: Annotated[str, typer.Option(help="Also measure with this check: off, sample or full.")] = "off",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Move a request's scattered blocks between two processes and print what it took."""
    if model not in MODELS:
        raise ConfigError(f"unknown model {model!r}: the shapes are {', '.join(MODELS)}")
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"unknown device {device!r}: cpu or cuda")
    if integrity not in get_args(Integrity):
        raise ConfigError(f"unknown integrity {integrity!r}: {', '.join(get_args(Integrity))}")
    try:
        chosen = json.loads(options)
    except json.JSONDecodeError as e:
        raise ConfigError(f"--options is not JSON: {e}") from None
    out = measure(backend, chosen, device, tokens, model, repeat, staging_bytes, cast(Integrity, integrity))
    if as_json:
        typer.echo(json.dumps(out))
        return
    for key, value in out.items():
        typer.echo(f"{key:24} {value}")


