"""Ends of a process's agents that might take the process along, each run by ``test_endings.py`` in one of its own:
``python -m tests.control.ending CASE BACKEND``. Prints ``fine`` at the end."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from itertools import count

from kvxfer.control.agent import Agent
from kvxfer.control.directory import Directory
from kvxfer.errors import KvxferError
from kvxfer.identity import TransferId
from kvxfer.protocol.values import Ended, Released
from tests.control.node import NodeEngine, name

CONFIG = {"transfer_timeout": 20.0, "lease": 20.0, "peer_timeout": 20.0, "abort_timeout": 5.0, "staging_bytes": 1 << 20}


def engine(backend: str, seed: int = 0) -> NodeEngine:
    return NodeEngine(backend, 256, seed, **CONFIG)


def wait(e: NodeEngine, seen: list[object], transfer: TransferId, sort: type = Ended) -> Ended:
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        seen += e.agents[0].events()
        for event in seen:
            if isinstance(event, sort) and event.transfer == transfer:  # type: ignore[attr-defined]
                return event  # type: ignore[return-value]
        time.sleep(0.005)
    raise AssertionError(f"{transfer} did not come to its end: {seen}")


def live(backend: str) -> tuple[NodeEngine, NodeEngine]:
    """A producer and a consumer with a link over which something has moved, and something waits."""
    p, d = engine(backend, 1), engine(backend)
    p.offer(name("first"), [3, 1], 8, 1, True)
    d.fetch(name("first"), p.source, [5, 2], 8)
    assert wait(d, [], name("first")).outcome.delivered
    assert d.blocks([5, 2]) == p.blocks([3, 1])
    for i in range(8):
        p.offer(name(i), [2 * i], 4, 1, False)
        d.fetch(name(i), p.source, [2 * i, 2 * i + 1], 8)
    time.sleep(0.05)
    return p, d


def use(
    p: NodeEngine, d: NodeEngine, names: str, k: int, offered: list[str], fetched: list[str], stop: threading.Event
) -> None:
    """Offer a block and fetch it into others in turn; the lists get the names of what was taken, not refused, as where it is closed."""
    for i in count():
        if stop.is_set():
            return
        t = f"{names}-{i}"
        with suppress(KvxferError):
            p.offer(name(t), [20 + k], 4, 1, True)
            offered.append(t)
        with suppress(KvxferError):
            d.fetch(name(t), p.source, [64 + 8 * k + i % 8], 4)
            fetched.append(t)
        time.sleep(0.001)


def close(thing: Agent | Directory, said: list[object]) -> None:
    said.append(thing.close(30.0))


def many(backend: str) -> None:
    """Sixteen threads close two agents under use, while others go on to use them."""
    for turn in range(4):
        p, d = live(backend)
        for e in (p, d):
            e.agents[0].events()
        offered: list[str] = []
        fetched: list[str] = []
        stop = threading.Event()

        users = [threading.Thread(target=use, args=(p, d, f"{turn}-{k}", k, offered, fetched, stop)) for k in range(2)]
        said: list[object] = []
        closers = [
            threading.Thread(target=close, args=(x, said))
            for x in (p.agents[0], d.agents[0], p.directory, d.directory) * 4
        ]
        for t in users:
            t.start()
        time.sleep(0.02 * turn)
        for t in closers:
            t.start()
        for t in closers:
            t.join(40.0)
            assert not t.is_alive(), "close did not return"
        assert False not in said, "not quiet"
        stop.set()
        for t in users:
            t.join()
        for e, went in ((p, offered), (d, fetched)):
            ended = {str(name(t)) for t in went} | {str(name(i)) for i in range(8)}
            events = e.agents[0].events()
            for sort in (Ended, Released):
                found = Counter(str(x.transfer) for x in events if isinstance(x, sort))
                assert set(found) == ended and set(found.values()) == {1}, (sort, ended ^ set(found), found)


def leave(backend: str) -> None:
    """The interpreter ends with live links and transfers in hand."""
    global kept  # modules go last
    kept = live(backend)


def fork(backend: str) -> None:
    """A child changes nothing for its parent, whatever it tries and however it ends."""
    p, d = live(backend)
    sight = p.agents[0]._revocations.declared
    for how in ("exit", "_exit", "use", "collect"):
        pid = os.fork()
        if pid == 0:
            calls = [
                lambda: d.fetch(name("child"), p.source, [9], 4),
                lambda: p.offer(name("child"), [9], 4, 1, True),
                d.agents[0].events,
                d.agents[0].stats,
                lambda: d.agents[0].cancel("x", "y"),
                lambda: p.agents[0].renew(name("child")),
                lambda: p.agents[0].revoke(name(0), 1, "child", True),
                lambda: p.directory.publish(()),
                p.directory.notices,
                lambda: p.settle(d.source, name(0)),
            ]
            if how == "use":
                for call in calls:
                    try:
                        call()
                    except KvxferError as e:
                        if "was forked" in str(e):
                            continue
                    os._exit(3)
            for e in (p, d):
                e.close()
            if how == "collect":
                del p, d, calls, e
                gc.collect()
            if how == "_exit":
                os._exit(0)
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0, how
        assert p.agents[0]._revocations.declared == sight
        p.offer(name(how), [3, 1], 8, 1, True)
        d.fetch(name(how), p.source, [20, 21], 8)
        assert wait(d, [], name(how)).outcome.delivered
    for i in range(8):  # those that waited go on
        p.offer(name(i), [2 * i, 2 * i + 1], 8, 1, True)
    seen: list[object] = []
    for i in range(8):
        assert wait(d, seen, name(i)).outcome.delivered
    p.close()
    d.close()


def signalled(backend: str) -> None:
    """The handler of a signal comes amid calls of the agent: it calls it, too, and in the end drains it."""
    e, rng = engine(backend), random.Random(0)
    ended: list[bool] = []

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGALRM:
            e.agents[0].renew(name(0))
        else:
            ended.append(e.agents[0].drain(1.0))

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.00073)
    until = time.monotonic() + 3.0
    while time.monotonic() < until:
        e.agents[0].renew(name(0))
        time.sleep(rng.uniform(0, 0.0003))
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.raise_signal(signal.SIGTERM)
    assert ended == [True]
    e.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    print("fine", flush=True)
