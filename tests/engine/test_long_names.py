"""A peer chooses the names of transfers and its reasons: whatever remembers them takes no more memory for long ones."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvxfer.config import Config
from kvxfer.control.directory import Directory
from kvxfer.failures import FailureKind
from kvxfer.identity import TransferId
from kvxfer.protocol import messages as m
from kvxfer.protocol.messages import Await, Decline, Named, Renew
from kvxfer.testing.engine import PagedEngine
from tests.control.conftest import until
from tests.protocol.test_doors import TABLE, WRONG, Door

MANY, MOST = 300, 6 << 20
"""So many take 64 KiB each if they are kept as they are."""
WIDE = "\N{GRINNING FACE}"
REASON = WIDE * 2000


def name(i: int) -> TransferId:
    return TransferId(f"own/{i:09}/{WIDE * 16000}", 0)


@contextmanager
def no_more_memory() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < MOST, f"{grown >> 20} MiB more"


def given_up(door: Door, i: int) -> None:
    door.says(WRONG, m.CloseAttempt(name(i), i + 1, WRONG, FailureKind.CANCELLED, REASON))


def asked_and_given_up(door: Door, i: int) -> None:
    door.says(WRONG, m.FetchRequest(name(i), i + 1, WRONG, 0, 4, TABLE, 1, 5.0))
    given_up(door, i)


def committed(door: Door, i: int) -> None:
    door.says(WRONG, m.Committed(name(i), i + 1, WRONG))


@pytest.mark.parametrize("says", [given_up, asked_and_given_up, committed])
def test_what_a_consumer_says_of_transfers_that_are_over(says: object) -> None:
    door = Door()
    with no_more_memory():
        for i in range(MANY):
            says(door, i)  # type: ignore[operator]


def test_what_a_consumer_waits_for_counts_with_its_name() -> None:
    door, waits = Door(), 0
    for i in range(1400):
        said = door.says(WRONG, m.FetchRequest(name(i), i + 1, WRONG, 0, 4, TABLE, 1, 5.0))
        waits += not said
    assert waits < 80 << 20 >> 16, "80 MiB are for all that wait"


@pytest.mark.parametrize("kind", [Await, Decline, Renew])
def test_what_a_directory_is_told(kind: type[Await | Decline | Renew]) -> None:
    with PagedEngine(Config(), name="p") as p, Directory(Config(), "d") as d:
        p.offer("q", 16)
        at, p.scheduler.directory.begun = p.scheduler.source, lambda transfer, digest: transfer.base == "own/1/over"

        def tell(i: int) -> None:
            more = (REASON,) if kind is Decline else ()
            d.tell(at, kind(at.epoch, (Named(name(i), b"d"),), *more))

        def taken_in() -> None:
            """All that was said before has been: an answer to one more question is here."""
            d.tell(at, Await(at.epoch, (Named(TransferId("own/1/over", 0), b"d"),)))
            until(lambda: bool(p.step() and d.notices()))

        tell(0)
        taken_in()
        with no_more_memory():
            for i in range(1, MANY):
                tell(i)
                if not i % 50:
                    taken_in()
            taken_in()
