"""One descriptor stands for all reasons to wake."""

import os
import select
import threading
import time
from collections.abc import Iterator

import pytest

from kvxfer.backend.wakeup import Wakeup
from tests.descriptors import descriptors_kept


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    wakeup = Wakeup()
    yield wakeup
    wakeup.close()


def readable(wakeup: Wakeup, within: float = 0.0) -> bool:
    return bool(select.select([wakeup.fileno()], [], [], within)[0])


def test_a_flag_wakes_until_it_is_cleared(wakeup: Wakeup) -> None:
    assert not readable(wakeup)
    threading.Thread(target=wakeup.set).start()
    assert readable(wakeup, 5)
    assert wakeup.clear() == set()
    assert not readable(wakeup)


def test_descriptors_wake_while_they_are_readable(wakeup: Wakeup) -> None:
    ours, theirs = os.pipe()
    wakeup.add(ours, "pipe")
    os.write(theirs, b"x")
    assert readable(wakeup, 5)
    assert wakeup.clear() == {"pipe"}
    assert readable(wakeup)
    os.read(ours, 1)
    assert not readable(wakeup)
    wakeup.remove(ours)
    os.write(theirs, b"x")
    assert not readable(wakeup)
    os.close(ours)
    os.close(theirs)


def test_a_time_wakes_when_it_has_come(wakeup: Wakeup) -> None:
    due = time.monotonic() + 0.05
    wakeup.at(due)
    assert readable(wakeup, 5) and time.monotonic() >= due
    wakeup.clear()
    assert not readable(wakeup)


def test_a_time_can_be_replaced(wakeup: Wakeup) -> None:
    wakeup.at(time.monotonic() + 0.02)
    wakeup.at(time.monotonic() + 3600)
    assert not readable(wakeup, 0.1)
    wakeup.at(time.monotonic() - 1)  # that has come already
    assert readable(wakeup, 5)
    wakeup.at(None)
    assert not readable(wakeup)


def test_a_later_time_takes_back_one_that_has_come(wakeup: Wakeup) -> None:
    wakeup.at(time.monotonic() - 1)
    assert readable(wakeup, 5)
    wakeup.at(time.monotonic() + 3600)
    assert not readable(wakeup, 0.05)


def test_close_gives_all_descriptors_back() -> None:
    kept = []

    def make() -> None:
        kept.append(Wakeup())

    def make_and_close() -> None:
        make()
        kept[-1].close()
        kept[-1].close()

    assert descriptors_kept(make, 10) == 3, "one that polls, a flag, a timer"
    assert not descriptors_kept(make_and_close, 10)


def test_a_descriptor_that_rests_does_not_wake_and_a_time_that_was_set_does(wakeup: Wakeup) -> None:
    ours, theirs = os.pipe()
    os.write(theirs, b"x")
    wakeup.add(ours, "pipe")
    wakeup.rest(ours, 60)
    assert not readable(wakeup)
    wakeup.at(time.monotonic() + 0.02)
    assert readable(wakeup, 5) and wakeup.clear() == set() and not readable(wakeup)
    wakeup.rest(ours, 0.02)
    wakeup.at(time.monotonic() + 60)
    while not wakeup.clear():
        assert readable(wakeup, 5)
    assert readable(wakeup)
    wakeup.rest(ours, 0.01)
    wakeup.remove(ours)
    time.sleep(0.02)
    assert wakeup.clear() == set() and not readable(wakeup)
    os.close(ours)
    os.close(theirs)
