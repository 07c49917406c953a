"""A block that a load fills is not offered, and one that is offered is not filled: a third engine would take the bytes for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvxfer import BlockTable, TransferId
from kvxfer.engine import ScheduleError
from kvxfer.testing.engine import PagedEngine

TOKENS = 4


@pytest.fixture
def three() -> Iterator[tuple[PagedEngine, PagedEngine, PagedEngine]]:
    """A producer, an engine that loads from it and offers what it has, and one that loads from that."""
    with PagedEngine() as p, PagedEngine() as d, PagedEngine() as third:
        for engine in (p, d, third):
            engine.step()
        yield p, d, third


def waits(d: PagedEngine, name: str, p: PagedEngine, blocks: list[int]) -> TransferId:
    """A load of the tokens of these blocks that the producer has not offered yet."""
    ticket = p.ask(name, TOKENS * len(blocks))
    d.load(name, ticket, TOKENS * len(blocks), blocks)
    d.step()
    return ticket.transfer


def test_what_has_not_arrived_is_not_offered(three: tuple[PagedEngine, PagedEngine, PagedEngine]) -> None:
    p, d, third = three
    d.memory.write([1, 2, 3], 99)  # of somebody else
    waits(d, "r", p, [1, 2])
    mine = TransferId.mint(d.scheduler.source.epoch, "r")
    assert d.scheduler.offer("r", mine, b"r", 3 * TOKENS)
    ticket, table = d.scheduler.ticket("r"), BlockTable.of([[1, 2, 3]])
    assert ticket is not None
    told = "request r cannot run with block 1, which the load of request r still fills: run it once that load is over"
    with pytest.raises(ScheduleError, match=told):
        d.scheduler.runs("r", 2 * TOKENS, TOKENS, table)
    d.step()
    third.load("x", ticket, 12, [4, 5, 6])
    third.step()
    p.run("r", b"r", 0, 2 * TOKENS, [5, 6])
    p.step()
    assert "r" in d.until("r").loaded
    d.memory.compute(b"r", [1, 2, 3], 2 * TOKENS, 3 * TOKENS)
    d.scheduler.runs("r", 2 * TOKENS, TOKENS, table)
    d.step()
    assert "x" in third.until("x").loaded
    third.verify()


def test_nothing_is_loaded_into_what_is_offered(three: tuple[PagedEngine, PagedEngine, PagedEngine]) -> None:
    p, d, third = three
    ticket = d.offer("q", 8, [1, 2])
    source = p.offer("r", 8, [5, 6])
    told = "request r cannot load into block 2, which the offer of request q still uses: give each block to one of them"
    with pytest.raises(ScheduleError, match=told):
        d.load("r", source, 8, [2, 3])
    assert d.scheduler.loadable("r", 0) == 0, "it has failed: no tokens will come"
    third.load("x", ticket, 8, [4, 5])
    assert "x" in third.until("x").loaded
    third.verify()
    assert "q" in d.until("q").free
    d.scheduler.finished("r", BlockTable.of([[]]), complete=False)
    again = p.offer("s", 8, [3, 4])
    d.load("s", again, 8, [2, 3])  # now they are free
    assert "s" in d.until("s").loaded
    d.verify()


def test_two_loads_have_blocks_of_their_own(three: tuple[PagedEngine, PagedEngine, PagedEngine]) -> None:
    p, d, _ = three
    waits(d, "r", p, [1, 2])
    with pytest.raises(
        ScheduleError, match="request s cannot load into block 2, which the load of request r still uses"
    ):
        d.load("s", p.offer("s", 8, [5, 6]), 8, [2, 3])


def test_a_prompt_that_ends_in_blocks_of_a_load_is_withdrawn(
    three: tuple[PagedEngine, PagedEngine, PagedEngine],
) -> None:
    p, d, third = three
    waits(d, "r", p, [1, 2])
    ticket = d.ask("q", 2 * TOKENS)
    d.scheduler.runs("q", 0, 2 * TOKENS, BlockTable.of([[3, 4]]))
    assert not d.scheduler.finished("q", BlockTable.of([[3, 1]]), complete=True)
    d.step()
    third.load("x", ticket, 8, [4, 5])
    assert "block 1, which the load of request r still fills" in third.until("x").failed["x"].detail
