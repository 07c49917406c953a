"""A process that has no descriptor left keeps the links that it has, and makes others once it has some again."""

import gc
import importlib
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import pytest

from kvxfer.errors import TransportError
from kvxfer.testing.conformance import Suite, World
from kvxfer.testing.participant import Runs
from tests.conftest import require


@contextmanager
def no_descriptor_left(but: int = 0) -> Iterator[None]:
    """Let this process open ``but`` descriptors more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(fd) for fd in os.listdir("/proc/self/fd")} - {(spare := os.dup(0))}
    os.close(spare)
    unused = (fd for fd in count() if fd not in used)
    limit = 3 if not but else next(islice(unused, but - 1, None)) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
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


@pytest.mark.parametrize(
    "backend, kind, options",
    [
        ("tcp", "kvxfer_tcp:TcpTransport", {}),
        ("cma", "kvxfer_cma:CmaTransport", {"mode": "vm"}),
        ("cma", "kvxfer_cma:CmaTransport", {"mode": "shm"}),
        (None, "tests.backends.cuda_on_host:OnHost", {}),
    ],
)
def test_what_cannot_be_made_keeps_none(backend: str | None, kind: str, options: dict[str, Any]) -> None:
    """It is tried again and again, and took with it what had come free since."""
    if backend is not None:
        require(backend)
    module, _, name = kind.partition(":")
    make = getattr(importlib.import_module(module), name)
    make("first", options).close()  # what is loaded for it is loaded now
    refused = 0
    for but in range(12):
        gc.collect()
        before = set(os.listdir("/proc/self/fd"))
        with no_descriptor_left(but):
            try:
                make("short", options).close()
            except (OSError, TransportError):
                refused += 1
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) == before, f"with {but} descriptors"
    assert 2 < refused < 12
