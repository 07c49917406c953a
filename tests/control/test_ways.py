"""Two agents find out, by what their transfers take, whether a part pays straight or staged, whoever moves the bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvxfer.config import Config
from kvxfer.control.agent import Agent
from kvxfer.control.link import LinkStatus
from kvxfer.geometry import Cache, Group, View
from kvxfer.identity import TransferId
from kvxfer.memory import allocate
from kvxfer.protocol.values import Ended, Released
from kvxfer.testing import FakeTransport, Network
from kvxfer.testing.engine import AgentEngine
from kvxfer.transport import Batch, Fence
from kvxfer.values import BlockTable, Fetch, Offer

ROW, BLOCKS, PART = 4096, 2048, 768
"""A part of 3 MiB."""


class Dear(FakeTransport):
    """A fake that takes a while for each run of a batch."""

    each_s = 0.0

    def start(self, number: int, link: Any, batch: Batch, after: Fence | None) -> None:
        self._options["delay_s"] = self.each_s * len(batch.lengths)
        super().start(number, link, batch, after)


class VeryDear(Dear):
    each_s = 40e-6


class Pair:
    """An agent that offers what another one fetches; blocks are scattered."""

    def __init__(self, stack: ExitStack, backend: type, verbs: list[str], run_bytes: int) -> None:
        options = {"network": Network(), "verbs": verbs, "run_bytes": run_bytes}
        config = Config(backend=f"{__name__}:{backend.__name__}", backend_options=options)
        self.spaces = [allocate(BLOCKS * ROW) for _ in "pd"]
        view = View("kv", 0, ("0",), (0,), BLOCKS, ROW, ROW, "bytes")
        caches = [Cache((space.region,), (Group(1),), (view,)) for space in self.spaces]
        self.engine = stack.enter_context(AgentEngine(config, caches=caches[:1]))
        self.p, self.d = self.engine.agents[0], stack.enter_context(Agent(caches[1], config, "d"))
        self.dice, self.number = random.Random(1), 0

    def fetch(self) -> None:
        self.number += 1
        name = TransferId("own/1/x", self.number)
        src, dst = (BlockTable.of([self.dice.sample(range(BLOCKS), PART)]) for _ in "pd")
        self.p.offer(Offer(name, b"d", 1, PART, src, True))
        self.d.fetch(Fetch(str(self.number), name, b"d", self.engine.source, dst, 0, PART))
        left: set[type] = {Ended, Released}
        while left:
            for event in self.d.events(1.0):
                assert not isinstance(event, Ended) or event.outcome.delivered, event
                left.discard(type(event))
        self.p.events()

    def ways(self, fetches: int) -> tuple[int, int]:
        """Fetch, and return how many parts went straight and staged, as seen where both are."""
        at = self.d if "write" not in self.d.config.backend_options["verbs"] else self.p
        before = at.stats()
        for _ in range(fetches):
            self.fetch()
        after = at.stats()
        return after.direct - before.direct, after.staged - before.staged

    def measured(self) -> LinkStatus:
        """Return the link as the side sees it that measures."""
        [link] = [link for agent in (self.p, self.d) for link in agent.links() if link.cost is not None]
        return link


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


WAYS = {"read": ["read"], "write": ["write"], "sendrecv": ["send", "recv"]}


@pytest.mark.parametrize("verbs", WAYS.values(), ids=WAYS)
def test_dear_descriptors_make_parts_go_staged(stack: ExitStack, verbs: list[str]) -> None:
    """The first guess says straight, which takes 30 ms; a piece takes a tenth of that."""
    pair = Pair(stack, VeryDear, verbs, 1024)
    assert pair.ways(3) == (3, 0), "nothing is known yet"
    for _ in range(20):
        straight, staged = pair.ways(10)
        if staged > 7:
            break
    else:
        pytest.fail(f"still straight: {pair.measured().cost}")
    link = pair.measured()
    assert link.cost is not None and link.cost.descriptor is not None
    assert link.cost.descriptor == pytest.approx(VeryDear.each_s, rel=0.5)
    assert link.role == ("producer" if verbs == ["write"] else "consumer")


def test_little_is_tried_where_the_first_guess_is_right(stack: ExitStack) -> None:
    """It says staged, which a part's descriptors would make ten times as long."""
    pair = Pair(stack, VeryDear, ["read"], 64 << 10)
    straight, staged = pair.ways(150)
    assert straight <= 5 and straight + staged == 150


def test_a_row_that_leaves_no_doubt_is_not_tried(stack: ExitStack) -> None:
    pair = Pair(stack, Dear, ["read"], 1 << 30)
    assert pair.ways(60) == (0, 60)
