"""Memory is given back and taken anew while an engine runs: peers find the new memory, and nothing of the old one is touched."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvxfer import Agent, ArgumentError, BlockTable, Config, FailureKind, Group, KvxferError, Rank, Ticket, TransferId
from kvxfer.engine import BlockPins, SchedulerSide, Update, WorkerSide
from kvxfer.geometry import Cache, Region, View
from tests.control.conftest import until

BLOCKS, TOKENS, UNIT = 8, 4, 16
FACTS = {"model": "small"}
CONFIG = {"backend": "kvxfer.testing.fake:FakeTransport", "transfer_timeout": 4.0, "peer_timeout": 2.0}


class Engine:
    def __init__(self, pins: BlockPins | None = None, facts: dict[str, str] = FACTS, **config: Any) -> None:
        self.config, self.facts = Config.from_mapping(CONFIG | config), facts
        self.scheduler = SchedulerSide(self.config, "e", (Group(TOKENS),), 1, facts, pins=pins)
        self.worker = WorkerSide(self.agent())
        self.update = Update()

    def agent(self) -> Agent:
        self.memory = np.zeros((BLOCKS, TOKENS, UNIT), np.uint8)
        view = View("kv", 0, ("0",), (0,), BLOCKS, TOKENS * UNIT, UNIT, "e", None, UNIT)
        cache = Cache((Region(self.memory.ctypes.data, self.memory.nbytes),), (Group(TOKENS),), (view,))
        return Agent(cache, self.config, "e", self.facts)

    def turn(self) -> Update:
        step = self.scheduler.step()
        self.worker.begin(step)
        self.worker.load(step)
        self.worker.after_forward(step)
        return self.scheduler.report(self.worker.collect(timeout=0.01))

    def offer(self, name: str, blocks: list[int], value: int, consumers: int = 1) -> Ticket:
        transfer = TransferId.mint(self.scheduler.source.epoch, name)
        assert self.scheduler.offer(name, transfer, name.encode(), TOKENS * len(blocks), consumers=consumers)
        ticket = self.scheduler.ticket(name)
        assert ticket is not None
        self.memory[blocks] = value
        table = BlockTable.of([blocks])
        self.scheduler.runs(name, 0, TOKENS * len(blocks), table)
        self.turn()
        assert self.scheduler.finished(name, table, complete=True)
        return ticket

    def load(self, name: str, ticket: Ticket, blocks: list[int]) -> None:
        tokens = TOKENS * len(blocks)
        assert self.scheduler.load(name, ticket.transfer, ticket.digest, ticket.source, tokens)
        self.scheduler.allocated(name, BlockTable.of([blocks]), self.scheduler.loadable(name, 0) or 0)

    def until(self, name: str) -> Update:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            update = self.turn()
            if name in update.loaded | update.free | update.failed.keys():
                return update
        raise AssertionError(f"nothing came of {name}")

    def close(self) -> None:
        self.worker.close()
        self.scheduler.close()


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    p, d = Engine(), Engine()
    p.turn(), d.turn()
    yield p, d
    p.close()
    d.close()


def move(p: Engine, d: Engine, name: str, value: int) -> None:
    d.load(name, p.offer(name, [1, 2], value), [3, 4])
    assert name in d.until(name).loaded and (d.memory[[3, 4]] == value).all()
    assert name in p.until(name).free


def hears_that_it_is_gone(agent: Agent) -> None:
    """Wait until an agent knows that its only peer is gone: what it asks for before that is under way, and fails."""
    until(lambda: not agent.links())


@pytest.mark.parametrize("whose", [0, 1], ids=["producer", "consumer"])
def test_an_engine_goes_on_over_other_memory(pair: tuple[Engine, Engine], whose: int) -> None:
    p, d = pair
    move(p, d, "before", 7)
    e, old = pair[whose], pair[whose].memory
    e.worker.suspend()
    hears_that_it_is_gone(pair[1 - whose].worker.agent)
    kept = old.copy()
    e.worker.resume(e.agent())
    e.turn()
    move(p, d, "after", 9)
    assert np.array_equal(old, kept), "memory that was given back has been written to"


def test_what_is_under_way_ends_and_says_so(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    move(p, d, "before", 7)  # so that there is a link
    held = p.offer("held", [1, 2], 7)
    p.turn()
    p.worker.suspend()
    hears_that_it_is_gone(d.worker.agent)
    p.worker.resume(p.agent())
    assert "held" in p.until("held").free
    d.load("held", held, [3, 4])
    failure = d.until("held").failed["held"]
    assert failure.kind in (FailureKind.NEVER_OFFERED, FailureKind.WITHDRAWN, FailureKind.PEER_LOST), failure
    q, ticket = "loading", Ticket(TransferId.mint(p.scheduler.source.epoch, "late"), b"late", p.scheduler.source)
    d.load(q, ticket, [3, 4])
    d.turn()
    d.worker.suspend()
    d.worker.resume(d.agent())
    assert d.until(q).failed[q].kind is FailureKind.CANCELLED
    move(p, d, "after", 9)


def test_wrong_numbers_and_payloads_are_refused_by_the_call(pair: tuple[Engine, Engine]) -> None:
    p, d = pair
    t = TransferId.mint(p.scheduler.source.epoch, "x")
    with pytest.raises(ArgumentError, match="consumers"):
        p.scheduler.offer("x", t, b"x", 4, consumers=0)
    with pytest.raises(ArgumentError, match="progress"):
        d.scheduler.load("x", t, b"x", p.scheduler.source, 4, progress=-1)
    assert not len(p.scheduler) and not len(d.scheduler)
    with pytest.raises(ArgumentError, match=r"payloads\[.*x#0\] must be bytes"):
        p.worker.after_forward(p.scheduler.step(), {t: "a text"})  # type: ignore[dict-item]
    move(p, d, "beside", 7)


def test_a_payload_for_an_offer_that_nobody_wants_any_more_is_forgotten_with_its_request(
    pair: tuple[Engine, Engine],
) -> None:
    """The engine need not know that its only consumer has given up before the prompt was computed."""
    p, d = pair
    transfer = TransferId.mint(p.scheduler.source.epoch, "declined")
    assert p.scheduler.offer("r", transfer, b"r", 2 * TOKENS)
    p.scheduler.runs("r", 0, TOKENS, BlockTable.of([[1]]))
    p.turn()
    assert d.scheduler.load("q", transfer, b"r", p.scheduler.source, 2 * TOKENS)
    d.scheduler.finished("q", BlockTable.of([[]]), complete=False)
    d.turn()
    until(lambda: p.turn() is not None and p.scheduler.ticket("r") is None)
    p.scheduler.runs("r", TOKENS, TOKENS, BlockTable.of([[1, 2]]))
    p.worker.after_forward(p.scheduler.step(), {transfer: b"its first token"})
    assert not p.scheduler.finished("r", BlockTable.of([[1, 2]]), complete=True)
    p.turn()
    until(lambda: p.turn() is not None and len(p.worker) == 0)


def test_another_rank_is_refused(pair: tuple[Engine, Engine]) -> None:
    p, _ = pair
    with pytest.raises(KvxferError, match=r"rank .*tp=0.*, not .*tp=1"):
        p.worker.resume(SimpleNamespace(cache=Cache((), (), (), Rank(tp=1))))  # type: ignore[arg-type]
