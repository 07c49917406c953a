"""A process that has no descriptor left keeps the links that it has, and makes others once it has some again."""

import importlib
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvxfer.errors import TransportError
from kvxfer.testing.conformance import Suite, World
from kvxfer.testing.participant import Runs
from tests.conftest import require


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "backend, kind, options",
    [
        ("tcp", "kvxfer_tcp:TcpTransport", {}),
        ("zmq", "kvxfer_zmq:ZmqTransport", {}),
        ("cma", "kvxfer_cma:CmaTransport", {"mode": "vm"}),
        ("cma", "kvxfer_cma:CmaTransport", {"mode": "shm"}),
    ],
)
def test_a_shortage_costs_new_links_only(backend: str, kind: str, options: dict[str, Any]) -> None:
    """Who connects meanwhile is not taken in, which keeps nobody busy. What is built on UCX, which opens files by itself, is not here."""
    require(backend)
    module, _, name = kind.partition(":")
    suite = type("Short", (Suite,), {"backend": getattr(importlib.import_module(module), name), "options": options})()
    world = World(suite)
    try:
        a, b = world.local(), world.process("far")
        world.allocate(a, b)
        link, way, runs = world.link(a, b), suite.ways()[0], Runs.of([0], [0], [1_000_000])
        world.move(link, way, a, b, runs)
        ends = [(a.endpoint(), b.endpoint()) for _ in range(3)]
        with no_descriptor_left():
            for mine, theirs in ends:
                b.connect(theirs, mine)
                try:
                    a.disconnect(a.connect(mine, theirs))
                except TransportError:
                    a.withdraw(mine)
            world.run(0.2)
            turns, until = 0, time.monotonic() + 0.5
            while time.monotonic() < until:
                world.turn(0.5)
                turns += 1
            assert turns < 100, f"it wants to be polled {turns} times in half a second"
            world.move(link, way, a, b, runs)
        world.run(0.3)
        world.move(link, way, a, b, runs)
        world.move(world.link(a, b), way, a, b, runs)
    finally:
        world.close()
