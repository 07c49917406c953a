"""Results are waited for, not polled: with a timeout, by descriptor, or in asyncio."""

from __future__ import annotations

import asyncio
import resource
import select
import threading
from collections.abc import Callable
from typing import Any

from kvxfer import Agent, Event, readable
from kvxfer.control.events import EventQueue
from kvxfer.identity import TransferId
from tests.control.conftest import Ended, Released, SeededEngine, fetch, offered

T = TransferId("own/1/x", 0)
ALL = [1, 2, 3, 4]
NEVER_S = 1e6
"""Longer than a test may take."""


def transfer(p: SeededEngine, d: SeededEngine) -> None:
    p.agents[0].offer(offered(ALL, 16, transfer=T))
    d.agents[0].fetch(fetch(p.source, ALL, 16, transfer=T))


def gather(agent: Agent, more: Callable[[], Any]) -> list[Event]:
    """Events up to the release, each batch after ``more``, which waits for it."""
    found: list[Event] = []
    while not any(isinstance(e, Released) for e in found):
        assert more(), found
        found += agent.events()
    return found


def polled(queue: EventQueue) -> bool:
    return bool(select.select([queue], [], [], 0)[0])


def is_whole(found: list[Event]) -> bool:
    return [type(e) for e in found] == [Ended, Released] and found[0].outcome.delivered  # type: ignore[union-attr]


def test_a_wait_ends_with_the_event(engine):
    p, d = engine({}, seed=1), engine({})
    threading.Timer(0.3, transfer, (p, d)).start()
    found: list[Event] = []
    while len(found) < 2:
        more = d.agents[0].events(timeout=10)
        assert more, "the wait ended with nothing"
        found += more
    assert is_whole(found)


def test_a_descriptor_polls_readable(engine):
    p, d = engine({}, seed=1), engine({})
    agent = d.agents[0]
    assert select.select([agent], [], [], 0.05)[0] == []
    transfer(p, d)
    assert is_whole(gather(agent, lambda: select.select([agent], [], [], 10)[0]))
    assert select.select([agent], [], [], 0.05)[0] == []


def test_tasks_await_results(engine):
    p, d = engine({}, seed=1), engine({})

    async def main() -> list[Event]:
        assert not await readable(d.agents[0], 0.05)
        onlooker = asyncio.create_task(readable(d.agents[0], 10))
        await asyncio.sleep(0)
        transfer(p, d)
        found: list[Event] = []
        while len(found) < 2:
            assert await readable(d.agents[0], 10)
            found += d.agents[0].events()
        assert await onlooker
        return found

    assert is_whole(asyncio.run(main()))


def test_who_waits_computes_nothing(engine):
    """It would wake 2,000 times to poll each millisecond."""
    agent = engine({}).agents[0]
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    assert agent.events(timeout=1.0) == []
    assert asyncio.run(readable(agent, 1.0)) is False
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - before < 50


def test_nobody_waits_for_a_closed_agent(engine):
    agent = engine({}).agents[0]
    threading.Timer(0.3, agent.close).start()
    while agent.events(timeout=NEVER_S):
        pass
    assert agent.events(timeout=NEVER_S) == [] and asyncio.run(readable(agent, NEVER_S))


def test_whoever_waits_is_told_once_for_all_that_has_happened() -> None:
    queue, heard = EventQueue(), list[int]()
    queue.heard = lambda: heard.append(len(heard))
    events = [Released("consumer", TransferId("own/1/x", i), str(i)) for i in range(3)]
    for event in events:
        queue.put(event)
    assert not heard and not polled(queue)
    queue.tell()
    assert len(heard) == 1 and polled(queue)
    queue.tell()
    assert len(heard) == 1
    assert queue.take(0.0) == events and not polled(queue)
    queue.put(events[0])
    assert queue.take(0.0) == events[:1], "who looks need not be told"
    queue.tell()
    assert len(heard) == 1 and not polled(queue)
    queue.put(events[0])
    queue.tell()
    assert len(heard) == 2 and polled(queue)
