"""``kvxfer bench control``: how many transfers the control plane makes, where their time goes, and what authentication costs.

One agent fetches single blocks from another, many at a time, over the default back end, so that nearly all of the time goes to control
and to the back end's fixed costs. This is measured with and without a key, in turns, and the medians of the rounds are compared. For
transfers without a key, the CPU time of each thread on both sides is reported too.

Steps: what each step of a small transfer costs by itself, that is both state machines and the messages between them, on one thread.
There is no socket, no other thread and no back end; these account for the rest of a transfer's time on the control threads. Times
are the least of many rounds. Calls are counted, and are the same on every host.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, TypeVar

import typer

from kvxfer.config import Config
from kvxfer.errors import KvxferError
from kvxfer.geometry import Planner, Rank, route
from kvxfer.identity import FIRST, Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import LinkInfo, Move, Moved, RankRoute, Resolved, Send
from kvxfer.security import make_key
from kvxfer.testing.remote import Remote
from kvxfer_bench.agents import LoadEngine, fetched, offered, small_cache
from kvxfer_bench.options import Json

UNDER_WAY = 200
TOGETHER = 25
"""Transfers that are asked for at once; several such batches are under way."""
BLOCK = 4096
PATIENCE_S = 30.0

BLOCKS = 200
ROUND = 150
"""Transfers whose times are added up in each of the rounds of which the least counts."""
HERE, THERE = b"consumer", ("tcp://127.0.0.1:1", 1)
"""The link, as the producer names it and as the consumer does."""

R = TypeVar("R")
Do = Callable[..., Any]
"""Does one step, given its name, a function and its arguments."""


def transfers(config: Config, seconds: float) -> tuple[float, dict[str, float]]:
    """Fetch transfers of a single block, with ``UNDER_WAY`` of them under way at any time.

    Return the transfers per second, and the microseconds of CPU that each takes on each thread of both sides.

    Raises:
        KvxferError: One was not delivered.
    """
    with (
        Remote("producer", LoadEngine, config, 1, BLOCK) as producer,
        closing(LoadEngine(config, 1, BLOCK)) as consumer,
    ):

        def cpu() -> dict[str, float]:
            sides = {"producer": producer("cpu"), "consumer": consumer.cpu()}
            return {f"{side} {thread}": s for side, spent in sides.items() for thread, s in spent.items()}

        source, begun, before, begin = producer("source"), 0, 0, 0.0
        while not begin or time.perf_counter() - begin < seconds:
            while begun - consumer.released <= UNDER_WAY - TOGETHER:
                producer.send("offer", begun, TOGETHER)
                consumer.fetch(source, begun, TOGETHER)
                producer.get()
                begun += TOGETHER
            consumer.listen(1.0)
            if not begin and consumer.released >= UNDER_WAY:  # links are up
                spent, begin, before = cpu(), time.perf_counter(), consumer.released
        count = consumer.released - before
        rate = count / (time.perf_counter() - begin)
        used = {thread: round((s - spent[thread]) / count * 1e6, 1) for thread, s in cpu().items()}
        for side in (consumer.until(begun, PATIENCE_S), producer("until", begun, PATIENCE_S)):
            if set(side["outcomes"]) != {"delivered"} or side["missing"]:
                raise KvxferError(f"a transfer was not delivered: {side['outcomes']} {side['words']}")
        return rate, used


class _Pair:
    """A producer's and a consumer's state machine with a link between them."""

    def __init__(self) -> None:
        cache = small_cache(BLOCKS, BLOCK)
        assigned = route([cache], [cache])[Rank()].assignments[Rank()]
        self.source, self.begun, self.now = Source("127.0.0.1", 1, 1), 0, 0.0
        self.revocations = RevocationCounter()
        self.producer = ProducerMachine(5.0, 30.0, self.revocations)
        self.consumer = ConsumerMachine(30.0, 30.0)
        self.producer.link_up(HERE, LinkInfo("read", Planner(cache, cache, assigned), 2, BLOCK, 1024), 0.0)
        seen = LinkInfo(
            "read", Planner(cache, cache, assigned), 1, BLOCK, revocations=lambda: self.revocations.declared
        )
        self.consumer.prepare(self.source, None)
        self.consumer.resolved(self.source, Resolved((RankRoute(THERE, 1),)), 0.0)
        self.consumer.link_up(THERE, seen, 0.0)

    def transfer(self, do: Do) -> None:
        """Move one block, from the calls of the two engines to both outcomes."""
        blocks = [self.begun % BLOCKS]
        offer, fetch = offered(self.begun, blocks, 16), fetched(self.begun, self.source, blocks, 16)
        self.begun, self.now = self.begun + 1, self.now + 0.001
        self.revocations.offered(offer.transfer, FIRST)
        do("offer", self.producer.offer, offer, self.now)
        (want,) = do("fetch", self.consumer.fetch, fetch, self.now)
        (have,) = do("want", self.producer.message, HERE, self._carried(do, want), self.now)
        (move,) = do("have", self.consumer.message, THERE, self._carried(do, have), self.now)
        assert isinstance(move, Move)
        do("runs", move.plan.runs)
        *events, last = do("moved", self.consumer.moved, Moved(move.ref, None, True, BLOCK), self.now)
        assert len(events) == 2
        events = do("committed", self.producer.message, HERE, self._carried(do, last), self.now)
        assert len(events) == 2
        self.revocations.over(offer.transfer, FIRST)
        do("timers", self._tick)

    def _carried(self, do: Do, action: Send) -> m.Message:
        """Return a message as the peer receives it."""
        frame = do("messages", m.encode, action.message)
        message: m.Message = do("messages", m.decode, frame)
        return message

    def _tick(self) -> None:
        for machine in (self.producer, self.consumer):
            due = machine.next_tick()
            if due is not None and due <= self.now:
                machine.tick(self.now)


def microseconds(rounds: int) -> dict[str, float]:
    """Return how long each step takes, in microseconds per transfer: the least of ``rounds`` rounds."""
    spent: Counter[str] = Counter()

    def do(step: str, function: Callable[..., R], *args: Any) -> R:
        begin = time.perf_counter_ns()
        out = function(*args)
        spent[step] += time.perf_counter_ns() - begin
        return out

    pair = _Pair()
    least: dict[str, int] = {}
    for _ in range(rounds):
        spent.clear()
        for _ in range(ROUND):
            pair.transfer(do)
        for step, ns in spent.items():
            least[step] = min(ns, least.get(step, ns))
    return {step: round(ns / ROUND / 1e3, 2) for step, ns in least.items()}


def calls(transfers: int = 200) -> dict[str, float]:
    """Return how many Python calls each step makes per transfer."""
    made: Counter[str] = Counter()

    def do(step: str, function: Callable[..., R], *args: Any) -> R:
        def count(frame: FrameType, event: str, arg: object) -> None:
            made[step] += event == "call"

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            return function(*args)
        finally:
            sys.setprofile(before)

    pair = _Pair()
    for _ in range(100):
        pair.transfer(lambda step, function, *args: function(*args))  # fills the caches that later transfers use
    gc.collect()
    gc.disable()  # when it runs, and what it calls then, is no part of a transfer
    try:
        for _ in range(transfers):
            pair.transfer(do)
    finally:
        gc.enable()
    return {step: round(n / transfers, 2) for step, n in made.items()}


def measure(seconds: float, rounds: int) -> dict[str, Any]:
    """Measure with a key and without one, in turns; return the medians and extremes of the rounds."""
    made, us = calls(), microseconds(60)
    rates: dict[str, list[float]] = {"plain": [], "keyed": []}
    cpu: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        make_key(Path(folder) / "key")
        for _ in range(rounds):
            for kind, key in (("plain", None), ("keyed", str(Path(folder) / "key"))):
                rate, each = transfers(Config(lease=5.0, key_file=key), seconds)
                rates[kind].append(rate)
                cpu += [each] if key is None else []
    median = {k: statistics.median(v) for k, v in rates.items()}
    return {
        "seconds": seconds,
        "rounds": rounds,
        "steps": {step: {"calls": n, "us": us[step]} for step, n in made.items()},
        "transfers": {f"{k}_per_s": round(v) for k, v in median.items()}
        | {f"{k}_least_most": [round(min(v)), round(max(v))] for k, v in rates.items()}
        | {"keyed_to_plain": round(median["keyed"] / median["plain"], 3)},
        "cpu_us": {thread: statistics.median(each[thread] for each in cpu) for thread in sorted(cpu[0])},
    }


def control(
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement, in seconds.")] = 3.0,
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure how many transfers of a single block two processes on this host manage per second, and what the steps of one cost."""
    found = measure(seconds, rounds)
    if as_json:
        typer.echo(json.dumps(found))
        return
    f = found["transfers"]
    typer.echo(
        f"transfers: {f['plain_per_s']}/s without a key ({f['plain_least_most'][0]} to {f['plain_least_most'][1]}), "
        f"{f['keyed_per_s']}/s with a key ({f['keyed_least_most'][0]} to {f['keyed_least_most'][1]}), ratio {f['keyed_to_plain']:.3f}"
    )
    typer.echo("CPU per transfer: " + ", ".join(f"{thread} {us:.0f} us" for thread, us in found["cpu_us"].items()))
    typer.echo(
        "steps of a transfer: "
        + ", ".join(f"{s} {f['calls']:.0f} calls in {f['us']:.1f} us" for s, f in found["steps"].items())
    )
