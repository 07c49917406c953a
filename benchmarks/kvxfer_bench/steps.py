"""Measures what each step of a small transfer costs: both state machines and the messages between them, on one thread.

There is no socket, no other thread and no back end; these account for the rest of a transfer's time on the control threads. Times
are the least of many rounds. Calls are counted, and are the same on every host.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from kvxfer.geometry import Planner, Rank, route
from kvxfer.identity import FIRST, Source
from kvxfer.protocol import messages as m
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.producer import ProducerMachine
from kvxfer.protocol.revocations import RevocationCounter
from kvxfer.protocol.values import LinkInfo, Move, Moved, RankRoute, Resolved, Send
from kvxfer_bench.agents import fetched, offered, small_cache

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
