"""What an engine hears of events: once for all of a turn, and nothing of what it has."""

from __future__ import annotations

import select

from kvxfer.control.events import EventQueue
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Released


def readable(queue: EventQueue) -> bool:
    return bool(select.select([queue], [], [], 0)[0])


def test_whoever_waits_is_told_once_for_all_that_has_happened() -> None:
    queue, heard = EventQueue(), list[int]()
    queue.heard = lambda: heard.append(len(heard))
    events = [Released("consumer", TransferId("own/1/x", i), str(i)) for i in range(3)]
    for event in events:
        queue.put(event)
    assert not heard and not readable(queue)
    queue.tell()
    assert len(heard) == 1 and readable(queue)
    queue.tell()
    assert len(heard) == 1
    assert queue.take(0.0) == events and not readable(queue)
    queue.put(events[0])
    assert queue.take(0.0) == events[:1], "who looks need not be told"
    queue.tell()
    assert len(heard) == 1 and not readable(queue)
    queue.put(events[0])
    queue.tell()
    assert len(heard) == 2 and readable(queue)
