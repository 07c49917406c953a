"""A process that has no descriptor left keeps the links that it has, and makes others once it has some again."""

import time
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest

from kvxfer import Agent, Config, KvxferError
from kvxfer.errors import TransportError
from kvxfer.geometry import Runs
from kvxfer.testing.engine import PagedMemory
from kvxfer.transport import registry
from tests.backends.conftest import way_of, world_of
from tests.conftest import require
from tests.descriptors import descriptors_kept, no_descriptor_left


@pytest.mark.parametrize(
    "backend, options", [("tcp", {}), ("zmq", {}), ("cma", {"mode": "vm"}), ("cma", {"mode": "shm"})]
)
def test_a_shortage_costs_new_links_only(backend: str, options: dict[str, Any]) -> None:
    """Who connects meanwhile is not taken in, which keeps nobody busy. What is built on UCX, which opens files by itself, is not here."""
    require(backend)
    with closing(world_of(backend, **options)) as world:
        a, b = world.local(), world.process("far")
        world.allocate(a, b)
        link, way, runs = world.link(a, b), way_of(world), Runs.of([0], [0], [1_000_000])
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


@pytest.mark.parametrize(
    "backend, options",
    [("tcp", {}), ("cma", {"mode": "vm"}), ("cma", {"mode": "shm"}), ("tests.backends.cuda_on_host:OnHost", {})],
)
def test_what_cannot_be_made_keeps_none(backend: str, options: dict[str, Any]) -> None:
    """It is tried again and again, and took with it what had come free since."""
    if backend == "cma":
        require(backend)
    make = registry.load(backend)
    make("first", options).close()  # what is loaded for it is loaded now
    refused = set()

    def attempt(but: int) -> None:
        with no_descriptor_left(but):
            try:
                make("short", options).close()
            except (OSError, TransportError):
                refused.add(but)

    for but in range(12):
        assert not descriptors_kept(partial(attempt, but), 3), f"with {but} descriptors"
    assert 2 < len(refused) < 12


@pytest.mark.parametrize(
    "backend, options", [("kvxfer.testing.fake:FakeTransport", {}), ("tcp", {}), ("cma", {"mode": "shm"})]
)
def test_an_agent_that_cannot_be_made_for_want_of_descriptors_leaves_none(
    backend: str, options: dict[str, Any]
) -> None:
    """Whichever it is that there is none for."""
    if backend == "cma":
        require(backend)
    config = Config.from_mapping({"backend": backend, "backend_options": options, "staging_bytes": 1 << 20})
    memory = PagedMemory()
    (cache,) = memory.caches
    Agent(cache, config).close()  # what the first of all opens stays
    made = set()

    def attempt(but: int) -> None:
        agent = None
        with no_descriptor_left(but), suppress(OSError, KvxferError):
            agent = Agent(cache, config)
        if agent is not None:
            agent.close()
            made.add(but)

    for but in range(40):
        assert not descriptors_kept(partial(attempt, but), 3), f"with {but} descriptors"
        if made:
            break
    assert made and min(made) > 5
