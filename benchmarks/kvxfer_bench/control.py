"""``kvxfer bench control``: what the control plane can do, where its time goes, and what authentication costs.

Messages: one process asks and another answers over a control socket, with enough questions in flight that neither waits.
Transfers: one agent fetches single blocks from another, many at a time, over the default back end, so that nearly all of the
time goes to control and to the back end's fixed costs. Both are measured with and without a key, in turns, and the medians of
the rounds are compared. For transfers without a key, the CPU time of each thread on both sides is reported too. Steps: what
each step of a transfer costs by itself (``steps.py``). Calls: what ``offer`` and ``fetch`` cost the engine's thread (``steps.py``).
"""

from __future__ import annotations

import json
import multiprocessing as mp
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.control.sockets import ControlSockets, address
from kvxfer.geometry import Cache, Group, Region, View
from kvxfer.identity import FIRST, Handle, Source, TransferBase, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Ended, Released
from kvxfer.security import Security, make_key
from kvxfer.values import BlockTable, Fetch, Offer
from kvxfer_bench import steps
from kvxfer_bench.cpu import ENGINE, spent

UNDER_WAY = 200
TOGETHER = 25
"""Transfers that are asked for at once; several such batches are under way."""
TABLE = BlockTable.of([range(256)])  # the blocks of a prompt of 4,096 tokens
BLOCK = 4096

spawn = mp.get_context("spawn")


def answer_requests(pipe: Connection, config: Config) -> None:
    """Answer fetch requests until told to stop."""
    sockets = ControlSockets(Security.of(config))
    pipe.send(sockets.listen("127.0.0.1", 0))
    ready = m.PartReady(TransferId(TransferBase("own/1/x"), 0), 1, FIRST, 0, 0, 4096, True, TABLE, 0, 0)
    while not pipe.poll():
        sockets.poll(0.5)
        for connection in sockets.ready():
            while (frame := connection.receive()) is not None:
                m.decode(frame)
                connection.send(ready)
        sockets.flush()


def messages(config: Config, seconds: float) -> float:
    """Return how many questions are answered per second."""
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=answer_requests, args=(theirs, config), daemon=True)
    process.start()
    sockets = ControlSockets(Security.of(config))
    connection = sockets.dial(address("127.0.0.1", pipe.recv()), None, m.MAX_BYTES)
    request = m.FetchRequest(TransferId(TransferBase("own/1/x"), 0), 1, b"digest of 16 byt", 0, 4096, TABLE, 1, 30.0)
    for _ in range(UNDER_WAY):
        connection.send(request)
    sockets.flush()
    count, begin = 0, None
    while begin is None or time.perf_counter() - begin < seconds:
        sockets.poll(5.0)
        for ready in sockets.ready():
            while (frame := ready.receive()) is not None:
                m.decode(frame)
                ready.send(request)
                count += 1
        sockets.flush()
        if begin is None and count > UNDER_WAY:
            count, begin = 0, time.perf_counter()
    rate = count / (time.perf_counter() - begin)
    pipe.send(None)
    process.join()
    sockets.close()
    return rate


def engine(config: Config) -> tuple[Agent, Directory]:
    """Make an engine of one rank with a cache of single-layer blocks."""
    memory = np.zeros(BLOCK * UNDER_WAY, np.uint8)
    view = View("kv", 0, ("layer",), (0,), UNDER_WAY, BLOCK, BLOCK, "bench")
    cache = Cache((Region(memory.ctypes.data, memory.nbytes),), (Group(16),), (view,))
    agent = Agent(cache, config)
    agent.memory = memory  # type: ignore[attr-defined]  # lives as long
    directory = Directory(config, "e", epoch=agent.epoch)
    directory.publish((agent.descriptor,))
    return agent, directory


def thread_seconds() -> Counter[str]:
    """Return the CPU seconds of this process, by thread: ``control``, ``data`` and all others together."""
    cpu = spent().cpu
    return Counter({ENGINE: cpu.total() - cpu["control"] - cpu["data"], "control": cpu["control"], "data": cpu["data"]})


def produce(pipe: Connection, config: Config) -> None:
    """Until told to stop, offer more transfers or report the CPU time used so far, as the other side asks."""
    agent, directory = engine(config)
    pipe.send(directory.source)
    offered = released = 0
    while (first := pipe.recv()) is not None:
        if first < 0:
            pipe.send(thread_seconds())
            continue
        for i in range(first, first + TOGETHER):
            table = BlockTable.of([[i % UNDER_WAY]])
            agent.offer(Offer(TransferId(TransferBase("own/1/x"), i), b"d", FIRST, 16, table, True))
        offered += TOGETHER
        released += _released(agent, 0.0)
    while released < offered:  # or the agent would cut transfers off and log that
        released += _released(agent, 1.0)
    agent.close()
    directory.close()


def _released(agent: Agent, timeout: float) -> int:
    return sum(isinstance(event, Released) for event in agent.events(timeout))


def transfers(config: Config, seconds: float) -> tuple[float, dict[str, float]]:
    """Fetch transfers of a single block, with ``UNDER_WAY`` of them under way at any time.

    Return the transfers per second, and the microseconds of CPU that each takes on each thread of both sides.

    Raises:
        SystemExit: One was not delivered.
    """
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=produce, args=(theirs, config), daemon=True)
    process.start()
    source: Source = pipe.recv()
    agent, directory = engine(config)
    free = deque(range(UNDER_WAY))  # blocks that nothing is fetched into
    used: dict[str, int] = {}  # by the fetch into it
    begun = released = before = 0
    begin = 0.0
    while not begin or time.perf_counter() - begin < seconds:
        while len(free) >= TOGETHER:
            pipe.send(begun)
            for i in range(begun, begun + TOGETHER):
                used[str(i)] = free.popleft()
                table = BlockTable.of([[used[str(i)]]])
                agent.fetch(Fetch(Handle(str(i)), TransferId(TransferBase("own/1/x"), i), b"d", source, table, 0, 16))
            begun += TOGETHER
        for event in agent.events(1.0):
            if isinstance(event, Ended) and not event.outcome.delivered:
                raise SystemExit(f"a transfer was not delivered: {event}")
            if isinstance(event, Released):
                released += 1
                free.append(used.pop(event.handle))
        if not begin and released >= UNDER_WAY:  # links are up
            spent = _both(pipe)
            begin, before = time.perf_counter(), released
    count = released - before
    rate = count / (time.perf_counter() - begin)
    cpu = {thread: round((s - spent[thread]) / count * 1e6, 1) for thread, s in _both(pipe).items()}
    while used:  # as at the producer
        for event in agent.events(1.0):
            if isinstance(event, Released):
                del used[event.handle]
    pipe.send(None)
    process.join()
    agent.close()
    directory.close()
    return rate, cpu


def _both(pipe: Connection) -> Counter[str]:
    """Return the CPU seconds of both sides' threads."""
    pipe.send(-1)
    sides = {"producer": pipe.recv(), "consumer": thread_seconds()}
    return Counter({f"{side} {thread}": s for side, spent in sides.items() for thread, s in spent.items()})


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """Measure with a key and without one, in turns; return the medians and extremes of the rounds for each kind of count."""
    out: dict[str, Any] = {"seconds": seconds, "rounds": rounds}
    made, microseconds = steps.calls(), steps.microseconds(60)
    out["steps"] = {step: {"calls": n, "us": microseconds[step]} for step, n in made.items()}
    out["engine_us"] = steps.thread_us(Config(lease=30.0))
    cpu: list[dict[str, float]] = []

    def moved(config: Config, seconds: float) -> float:
        rate, each = transfers(config, seconds)
        if config.key_file is None:
            cpu.append(each)
        return rate

    with tempfile.TemporaryDirectory() as folder:
        make_key(Path(folder) / "key")
        configs = {"plain": Config(lease=5.0), "keyed": Config(lease=5.0, key_file=str(Path(folder) / "key"))}
        measures: dict[str, Callable[[Config, float], float]] = {"messages": messages, "transfers": moved}
        for name, count in measures.items():
            rates = {k: [0.0] * rounds for k in configs}
            for i in range(rounds):
                for k, config in configs.items():
                    rates[k][i] = count(config, seconds)
            median = {k: statistics.median(v) for k, v in rates.items()}
            out[name] = {f"{k}_per_s": round(v) for k, v in median.items()}
            out[name] |= {f"{k}_least_most": [round(min(v)), round(max(v))] for k, v in rates.items()}
            out[name]["keyed_to_plain"] = round(median["keyed"] / median["plain"], 3)
    out["cpu_us"] = {thread: statistics.median(each[thread] for each in cpu) for thread in sorted(cpu[0])}
    return out


def control(
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement, in seconds.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how many control messages, and transfers of a single block, two processes on this host manage per second."""
    found = measure(seconds, rounds)
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name in ("messages", "transfers"):
        f = found[name]
        typer.echo(
            f"{name}: {f['plain_per_s']}/s without a key ({f['plain_least_most'][0]} to {f['plain_least_most'][1]}), "
            f"{f['keyed_per_s']}/s with a key ({f['keyed_least_most'][0]} to {f['keyed_least_most'][1]}), ratio {f['keyed_to_plain']:.3f}"
        )
    typer.echo("CPU per transfer: " + ", ".join(f"{thread} {us:.0f} us" for thread, us in found["cpu_us"].items()))
    typer.echo(
        "steps of a transfer: "
        + ", ".join(f"{s} {f['calls']:.0f} calls in {f['us']:.1f} us" for s, f in found["steps"].items())
    )
    typer.echo(
        "calls for 1,024 tokens, on the engine's thread: "
        + ", ".join(f"{call} {us:.1f} us" for call, us in found["engine_us"].items())
    )
