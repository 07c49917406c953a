"""Consumers in processes of their own that stop with staged bytes on their way: what their producer packed for them holds
slots of its staging memory, and others go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvxfer.config import SLOTS
from tests.control.conftest import until
from tests.control.node import Node, name, nodes
from tests.control.test_processes import usable

STAGED = {"staging_bytes": SLOTS * 4096, "peer_timeout": 20.0, "transfer_timeout": 40.0, "lease": 60.0, "blocks": 400}
"""Slots are as small as they can be, and nothing but the slots can be what one consumer waits for on account of others."""

CASES = [
    pytest.param(b, n, marks=pytest.mark.skipif(not usable(b), reason=f"{b} cannot be used here"))
    for b, stopped in (("zmq", (1, 2, 5)), ("cma", (1, 2, 5)), ("nixl", (1,)), ("ucx", (1,)))
    for n in stopped
]


@pytest.fixture
def make() -> Iterator[Callable[..., Node]]:
    """Makes nodes; ends them all."""
    with nodes() as made:
        yield made


@pytest.mark.keep(4)
@pytest.mark.parametrize(("backend", "stopped"), CASES)
def test_consumers_that_have_stopped_do_not_keep_staged_bytes_from_others(
    make: Callable[..., Node], backend: str, stopped: int
) -> None:
    """Each has been sent all that it could be. Only where so many have that no slot is left do others wait for a moment."""
    p = make(backend, seed=1, **STAGED)
    idle, busy = [make(backend, **STAGED) for _ in range(stopped)], make(backend, **STAGED)
    p.offer(name("warm"), [0], 4, 1, True)
    busy.fetch(name("warm"), p.source, [0], 4)
    assert busy.settled(name("warm")).outcome.delivered
    beside(p, idle, busy, "first")


def beside(p: Node, idle: list[Node], busy: Node, once: str) -> None:
    """Have consumers stop amid what they load; another one loads meanwhile."""
    for i, node in enumerate(idle):  # their links are there
        p.offer(name(f"{once} warm {i}"), [0], 4, 1, True)
        node.fetch(name(f"{once} warm {i}"), p.source, [0], 4)
        assert node.settled(name(f"{once} warm {i}")).outcome.delivered
        node.fetch(name(f"{once} {i}"), p.source, list(range(200)), 800)
    until(lambda: p.holds()[1] == len(idle))  # what they ask for
    with ExitStack() as stack:
        for node in idle:
            stack.enter_context(node.stopped())
        for i in range(len(idle)):
            p.offer(name(f"{once} {i}"), list(range(200)), 800, 1, True)
        time.sleep(0.3)
        p.offer(name(f"{once} small"), list(range(100, 111)), 44, 1, True)
        busy.fetch(name(f"{once} small"), p.source, list(range(11)), 44)
        assert busy.settled(name(f"{once} small"), timeout=39.0).outcome.delivered
    assert busy.blocks(list(range(11))) == p.blocks(list(range(100, 111)))
    for i, node in enumerate(idle):  # and once they live again they get what is theirs
        assert node.settled(name(f"{once} {i}")).outcome.delivered
        assert node.blocks(list(range(200))) == p.blocks(list(range(200)))
