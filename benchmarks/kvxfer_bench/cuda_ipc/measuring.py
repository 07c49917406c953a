"""How fast cuda_ipc moves the KV cache of a request between two processes on two GPUs of one host.

Prints a JSON object a line, and ends by itself. Shape: Llama-3-8B in bf16: 32 layers, blocks of 16 tokens, 8 KV heads
of 128, K and V of a block side by side, 64 KiB a block and layer, block ids scattered on both sides. GB are 1e9 bytes
of KV; times are from ``submit`` to the completion that ``poll`` returns, medians. ``of_link`` compares with a plain
copy of 1 GiB between the two GPUs, measured first; ``gbps_sleeping`` is when the caller sleeps on ``fileno``.
"""

from __future__ import annotations

import json
import multiprocessing
import select
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from kvxfer.errors import KvxferError
from kvxfer.geometry import Cache, CopyPlan, Group, Heads, Planner, Rank, Region, View, route
from kvxfer.geometry.region import flat_starts
from kvxfer.transport import PlanBatch, Quieted, Verb
from kvxfer_cuda_ipc import CudaIpcTransport

LAYERS, TOKENS, HEADS, HEAD_BYTES = 32, 16, 8, 256
PAGE = TOKENS * HEADS * HEAD_BYTES
BLOCKS = 2600
LAYER_BYTES = BLOCKS * 2 * PAGE
MIX = 2654435761


def say(**fields: Any) -> None:
    """Print a JSON object, with numbers cut to what they tell."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: short(v) for k, v in value.items()}
        return round(value, 3) if isinstance(value, float) else value

    print(json.dumps(short(fields)), flush=True)


def regions(base: int, device: int) -> tuple[Region, ...]:
    """Return a region a layer, side by side in one allocation."""
    return tuple(Region(base + i * LAYER_BYTES, LAYER_BYTES, f"cuda:{device}") for i in range(LAYERS))


def cache(layout: str, lo: int = 0, hi: int = HEADS, tp: int = 0) -> Cache:
    """Return a rank that holds the heads [lo, hi), in memory of the same size whatever it holds."""
    count = hi - lo
    token, head = (count * HEAD_BYTES, HEAD_BYTES) if layout == "NHD" else (HEAD_BYTES, TOKENS * HEAD_BYTES)
    page = TOKENS * count * HEAD_BYTES
    where = regions(1 << 40, 0)
    names = tuple(f"layer.{i}" for i in range(LAYERS))
    views = tuple(
        View(
            plane,
            0,
            names,
            tuple(at + v * page for at in flat_starts(where)),
            BLOCKS,
            2 * page,
            HEAD_BYTES,
            "bf16",
            Heads(lo, count, HEADS, head),
            token,
        )
        for v, plane in enumerate("kv")
    )
    return Cache(where, (Group(TOKENS),), views, Rank(tp=tp))


# name -> (producers, consumer); the first producer is the one that is read from
SHAPES = {
    "NHD to NHD": ([cache("NHD")], cache("NHD")),
    "NHD to HND": ([cache("NHD")], cache("HND")),
    "HND to NHD": ([cache("HND")], cache("NHD")),
    "TP 2 to 1, NHD": ([cache("NHD", 0, 4), cache("NHD", 4, 8, tp=1)], cache("NHD")),
    "TP 1 to 2, NHD": ([cache("NHD")], cache("NHD", 4, 8)),
    "TP 2 to 1, NHD to HND": ([cache("NHD", 0, 4), cache("NHD", 4, 8, tp=1)], cache("HND")),
}


def planner(shape: str) -> Planner:
    """Return the planner of a pair of layouts."""
    producers, consumer = SHAPES[shape]
    return Planner(producers[0], consumer, route(producers, [consumer])[Rank()].assignments[Rank()])


def scattered(planned: Planner, tokens: int, seed: int = 0) -> CopyPlan:
    """Return the plan of a request in blocks that lie anywhere."""
    random = np.random.default_rng(seed)
    blocks = -(-tokens // TOKENS)
    return planned.plan([random.permutation(BLOCKS)[:blocks]], [random.permutation(BLOCKS)[:blocks]], 0, tokens)


def serve(pipe: Connection, device: int) -> None:
    """Be the producer: memory whose every word says where it stands, and a transport that is only there."""
    torch.cuda.set_device(device)
    memory = torch.empty(LAYERS * LAYER_BYTES // 4, dtype=torch.int32, device=f"cuda:{device}")
    starts = flat_starts(regions(1 << 40, 0))
    for layer, start in enumerate(starts):
        words = torch.arange(LAYER_BYTES // 4, device=memory.device) + start // 4
        memory[layer * (LAYER_BYTES // 4) : (layer + 1) * (LAYER_BYTES // 4)] = signed(words)
    torch.cuda.synchronize()
    transport = CudaIpcTransport("producer", {})
    transport.register(regions(memory.data_ptr(), device))
    pipe.send("ready")
    while True:
        select.select([pipe.fileno(), transport.wakeup.fileno()], [], [])
        transport.poll()
        while pipe.poll(0):
            theirs = pipe.recv_bytes()
            if not theirs:
                transport.close()
                return
            mine = transport.endpoint()
            transport.connect(mine, theirs)
            pipe.send_bytes(mine)


def signed(words: torch.Tensor) -> torch.Tensor:
    """Return a 32-bit value for each word index."""
    mixed = words * MIX & 0xFFFFFFFF
    return torch.where(mixed >= 1 << 31, mixed - (1 << 32), mixed).to(torch.int32)


class Consumer:
    """One transport that reads from the producer."""

    def __init__(self, pipe: Connection, memory: torch.Tensor, device: int, **options: Any) -> None:
        self.transport = CudaIpcTransport("consumer", options)
        self.transport.register(regions(memory.data_ptr(), device))
        mine = self.transport.endpoint()
        pipe.send_bytes(mine)
        self.peer = self.transport.connect(mine, pipe.recv_bytes())

    def batch(self, plan: CopyPlan, verb: Verb = Verb.READ) -> PlanBatch:
        return PlanBatch(verb, self.peer, 0, plan)

    def move(self, batch: PlanBatch, wait: bool = False) -> tuple[float, float]:
        """Move a batch; return the seconds that ``submit`` took, and the whole.

        With ``wait`` it sleeps on ``fileno``, as a data thread does; else it polls without end.

        Raises:
            RuntimeError: It failed, or took too long.
        """
        begun = time.perf_counter()
        number = self.transport.submit(batch)
        submitted = time.perf_counter()
        while True:
            if wait:
                select.select([self.transport.wakeup], [], [], 10)
            for done in self.transport.poll():
                if isinstance(done, Quieted) or done.error is not None or done.batch != number:
                    raise RuntimeError(str(done))
                return submitted - begun, time.perf_counter() - begun
            if time.perf_counter() > begun + 20:
                raise RuntimeError("a batch has not ended within 20 s")

    def pipelined(self, batches: list[PlanBatch]) -> float:
        """Move batches that are all submitted before any has ended; return the seconds for all.

        Raises:
            RuntimeError: One failed.
        """
        begun, left = time.perf_counter(), len(batches)
        for batch in batches:
            self.transport.submit(batch)
        while left:
            for done in self.transport.poll():
                if isinstance(done, Quieted) or done.error is not None:
                    raise RuntimeError(str(done))
                left -= 1
        return time.perf_counter() - begun


def timed(consumer: Consumer, plan: CopyPlan, link: float, times: int = 9, verb: Verb = Verb.READ) -> dict[str, Any]:
    """Move a plan several times; return what it took."""
    batch = consumer.batch(plan, verb)
    for _ in range(3):
        consumer.move(batch)
    found = [consumer.move(batch) for _ in range(times)]
    slept = [consumer.move(batch, wait=True) for _ in range(times)]
    rate = plan.nbytes / statistics.median(t for _, t in found) / 1e9
    return {
        "bytes": plan.nbytes,
        "gbps": rate,
        "of_link": rate / link,
        "gbps_sleeping": plan.nbytes / statistics.median(t for _, t in slept) / 1e9,
        "us": statistics.median(t for _, t in found) * 1e6,
        "submit_us": statistics.median(t for t, _ in found) * 1e6,
        "submit_us_worst": max(t for t, _ in found + slept) * 1e6,
    }


def check(consumer: Consumer, memory: torch.Tensor, plan: CopyPlan) -> int:
    """Move a plan into memory of which all bits are set, and compare every word; returns how many are wrong or should not be there."""
    memory.fill_(-1)
    torch.cuda.synchronize()
    consumer.move(consumer.batch(plan))
    runs, wrong, changed = plan.runs(), 0, 0
    pitch = flat_starts(regions(1 << 40, 0))[1]
    for length in np.unique(runs.length):
        pick = np.flatnonzero(runs.length == length)
        for part in np.array_split(pick, max(1, len(pick) * int(length) >> 28)):
            src, dst = (torch.from_numpy(a[part]).to(memory.device) for a in (runs.src, runs.dst))
            step = torch.arange(0, int(length), 4, device=memory.device)
            want = signed((src[:, None] + step) // 4)
            flat = dst[:, None] + step
            at = (flat // pitch * LAYER_BYTES + flat % pitch) // 4
            found = memory[at]
            wrong += int((found != want).sum())
            changed += int((found != -1).sum())
    return wrong + int((memory != -1).sum()) - changed


def links(producer: int, consumer: int) -> dict[str, float]:
    """Measure a plain copy between the GPUs, GB/s."""
    rates = {}
    for name, size in (("128 MiB", 128 << 20), ("1 GiB", 1 << 30), ("4 GiB", 4 << 30)):
        src = torch.empty(size, dtype=torch.uint8, device=f"cuda:{producer}").random_()
        dst = torch.empty(size, dtype=torch.uint8, device=f"cuda:{consumer}")
        times = []
        for _ in range(9):
            torch.cuda.synchronize(producer)
            torch.cuda.synchronize(consumer)
            begun = time.perf_counter()
            dst.copy_(src)
            torch.cuda.synchronize(consumer)
            torch.cuda.synchronize(producer)
            times.append(time.perf_counter() - begun)
        rates[name] = size / statistics.median(times[2:]) / 1e9
        del src, dst
    torch.cuda.empty_cache()
    return rates


def slowdown(consumer: Consumer, plan: CopyPlan, device: int) -> dict[str, Any]:
    """Measure a loop of bf16 matrix products on the consumer's GPU, alone and beside transfers that follow each other."""
    a, b = (torch.randn(8192, 8192, device=f"cuda:{device}", dtype=torch.bfloat16) for _ in range(2))
    batch, count = consumer.batch(plan), 60

    def products() -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            a @ b
        end.record()
        return begin, end

    products()[1].synchronize()
    alone, beside, moved, spent = [], [], 0, 0.0
    for _ in range(3):
        begin, end = products()
        end.synchronize()
        alone.append(begin.elapsed_time(end))
        begin, end = products()
        while not end.query():
            spent += consumer.move(batch)[1]
            moved += plan.nbytes
        beside.append(begin.elapsed_time(end))
        torch.cuda.synchronize(device)
    base, with_copies = statistics.median(alone), statistics.median(beside)
    return {
        "matmul_ms": base / count,
        "tflops": 2 * 8192**3 * count / base / 1e9,
        "slowdown": with_copies / base - 1,
        "gbps_beside": moved / spent / 1e9,
    }


def sections(pipe: Connection, producer: int, device: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the sections of the measurement, each with a name."""
    torch.cuda.set_device(device)
    rates = links(producer, device)
    say(section="link", gbps=rates)
    link = rates["1 GiB"]
    memory = torch.empty(LAYERS * LAYER_BYTES // 4, dtype=torch.int32, device=f"cuda:{device}")
    plans = {shape: planner(shape) for shape in SHAPES}
    first = Consumer(pipe, memory, device)

    def bytes_right() -> None:
        total = 0
        for shape, planned in plans.items():
            for tokens in (1024, 1019):
                wrong = check(first, memory, scattered(planned, tokens))
                say(section="check", shape=shape, tokens=tokens, wrong=wrong)
                total += wrong
        if total:
            raise RuntimeError(f"{total} words are wrong, or should not be there")

    def sizes() -> None:
        for tokens in (64, 1024, 8192, 32768):
            say(section="size", tokens=tokens, **timed(first, scattered(plans["NHD to NHD"], tokens), link))

    def overlapped() -> None:
        plan = scattered(plans["NHD to NHD"], 1024)
        seconds = statistics.median(first.pipelined([first.batch(plan)] * 16) for _ in range(3))
        say(section="pipelined", tokens=1024, batches=16, gbps=16 * plan.nbytes / seconds / 1e9)

    def shapes() -> None:
        for shape, planned in plans.items():
            for tokens in (8192, 16384 if "TP" in shape else 32768):
                say(section="shape", shape=shape, tokens=tokens, **timed(first, scattered(planned, tokens), link, 5))

    def writes() -> None:
        plan = scattered(plans["NHD to NHD"], 8192)
        say(section="write", tokens=8192, **timed(first, plan, link, verb=Verb.WRITE))

    def sweep() -> None:
        plan, small, short = (
            scattered(plans[shape], tokens)
            for shape, tokens in (("NHD to NHD", 8192), ("NHD to NHD", 1024), ("NHD to HND", 8192))
        )
        for ctas in (2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64, 128):
            c = Consumer(pipe, memory, device, ctas=ctas)
            said = {name: timed(c, p, link, 5)["gbps"] for name, p in (("1k", small), ("8k", plan), ("8k_HND", short))}
            say(section="ctas", ctas=ctas, gbps=said, **slowdown(c, plan, device))
            c.transport.close()

    def engines() -> None:
        c = Consumer(pipe, memory, device, engine="copy")
        for shape, tokens in (("NHD to NHD", 1024), ("NHD to NHD", 8192), ("TP 1 to 2, NHD", 1024)):
            plan = scattered(plans[shape], tokens)
            say(section="copy engines", shape=shape, tokens=tokens, **timed(c, plan, link, 3))
        say(section="copy engines", **slowdown(c, scattered(plans["NHD to NHD"], 8192), device))
        c.transport.close()

    yield "check", bytes_right
    yield "size", sizes
    yield "pipelined", overlapped
    yield "shape", shapes
    yield "write", writes
    yield "ctas", sweep
    yield "copy engines", engines


def measure(seconds: float, producer: int | None, consumer: int) -> None:
    """Print all sections that begin within these seconds; ``producer`` of ``None`` takes the second GPU, if there is one.

    Raises:
        KvxferError: The producer did not start, or some sections failed, after all of them.
    """
    begun, failed = time.monotonic(), list[str]()
    if producer is None:
        producer = min(1, torch.cuda.device_count() - 1)
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=serve, args=(theirs, producer), daemon=True)
    child.start()
    theirs.close()
    names = [torch.cuda.get_device_name(d) for d in (producer, consumer)]
    say(section="setup", producer=producer, consumer=consumer, gpus=names, torch=torch.__version__)
    try:
        if not ours.poll(120):
            raise KvxferError("the producer did not start within 120 s")
        try:
            ours.recv()
        except EOFError:
            raise KvxferError("the producer's process ended at once; what it printed says why") from None
        for name, section in sections(ours, producer, consumer):
            if time.monotonic() > begun + seconds:
                say(section=name, skipped="out of time")
                continue
            try:
                section()
            except Exception as e:
                say(section=name, error=f"{type(e).__name__}: {e}", trace=traceback.format_exc(limit=-4))
                failed.append(name)
        with suppress(BrokenPipeError):  # then it has died, and sections have failed
            ours.send_bytes(b"")
        child.join(20)
    finally:
        if child.is_alive():
            child.kill()
    say(section="end", seconds=time.monotonic() - begun)
    if failed:
        raise KvxferError(f"what failed: {', '.join(failed)}; the lines above say why")
