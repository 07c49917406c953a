"""Measures what each step of a small transfer costs: both state machines and the messages between them, on one thread.

There is no socket, no other thread and no back end; these account for the rest of a transfer's time on the control threads. Times
are the least of many rounds. Calls are counted, and are the same on every host.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, TypeVar

import numpy as np

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.geometry import Cache, Group, Planner, Rank, Region, View, route
from kvxfer.identity import FIRST, Handle, Source, TransferBase, TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import Ended, LinkInfo, Move, Moved, RankRoute, Released, Resolved, Send
from kvxfer.values import BlockTable, Fetch, Offer

BLOCKS, BLOCK = 200, 4096
ROUND = 150
"""Transfers whose times are added up in each of the rounds of which the least counts."""
HERE, THERE = b"consumer", ("tcp://127.0.0.1:1", 1)
"""The link, as the producer names it and as the consumer does."""

R = TypeVar("R")
Do = Callable[..., Any]
"""Does one step, given its name, a function and its arguments."""


class _Pair:
    """A producer's and a consumer's state machine with a link between them."""

    def __init__(self) -> None:
        view = View("kv", 0, ("layer",), (0,), BLOCKS, BLOCK, BLOCK, "bench")
        cache = Cache((Region(0, BLOCKS * BLOCK),), (Group(16),), (view,))
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
        transfer, table = TransferId(TransferBase("own/1/x"), self.begun), BlockTable.of([[self.begun % BLOCKS]])
        offer = Offer(transfer, b"d", FIRST, 16, table, True)
        fetch = Fetch(Handle(str(self.begun)), transfer, b"d", self.source, table, 0, 16)
        self.begun, self.now = self.begun + 1, self.now + 0.001
        self.revocations.offered(transfer, FIRST)
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
        self.revocations.over(transfer, FIRST)
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


TOKENS, BLOCK_TOKENS = 1024, 16
PROMPT_BLOCKS = TOKENS // BLOCK_TOKENS
CALLS = 200
FLUSH = 64 << 20
"""Bytes that are read to have cold caches."""
PATIENCE_S = 30.0


def thread_us(config: Config, calls: int = CALLS) -> dict[str, float]:
    """Return the microseconds of CPU that each call takes on its thread, by the call's name; ``cold``: with cold caches.

    Raises:
        SystemExit: A transfer was not delivered.
    """
    memory = [np.zeros((1, PROMPT_BLOCKS, BLOCK_TOKENS, 16), np.uint8) for _ in range(2)]
    producer, consumer = (Agent(Cache.of_tensors(one, "layer block token unit"), config) for one in memory)
    flushed = np.zeros(FLUSH, np.uint8)
    spent: dict[str, list[int]] = {}

    def timed(name: str, call: Callable[[], None], cold: bool) -> None:
        if cold:
            flushed.max()
            name += "_cold"
        begin = time.thread_time_ns()
        call()
        spent.setdefault(name, []).append(time.thread_time_ns() - begin)

    with producer, consumer, Directory(config, "calls", epoch=producer.epoch) as directory:
        directory.publish((producer.descriptor,))
        table = BlockTable.of([range(PROMPT_BLOCKS)])
        for i in range(2 * calls):
            transfer, cold = TransferId(TransferBase("own/1/calls"), i), i % 2 == 1
            offer = Offer(transfer, b"d", FIRST, TOKENS, table, True)
            fetch = Fetch(Handle(str(i)), transfer, b"d", directory.source, table, 0, TOKENS)
            timed("offer", lambda offer=offer: producer.offer(offer), cold)  # type: ignore[misc]
            timed("fetch", lambda fetch=fetch: consumer.fetch(fetch), cold)  # type: ignore[misc]
            _released((producer, consumer))
    return {name: round(statistics.median(each) / 1e3, 1) for name, each in sorted(spent.items())}


def _released(agents: Iterable[Agent]) -> None:
    """Wait until a transfer is over on both sides."""
    for agent in agents:
        until, over = time.monotonic() + PATIENCE_S, False
        while not over and time.monotonic() < until:
            for event in agent.events(1.0):
                if isinstance(event, Ended) and not event.outcome.delivered:
                    raise SystemExit(f"a transfer was not delivered: {event}")
                over |= isinstance(event, Released)
        if not over:
            raise SystemExit(f"a transfer was not released within {PATIENCE_S:g} s")
