"""Offers behind fences: each is found once its fence has passed, and a turn asks few of those that have not."""

from __future__ import annotations

import math

import pytest

from kvxfer.control.fences import LOOKS, Fences
from kvxfer.identity import TransferId
from kvxfer.values import BlockTable, Offer


@pytest.fixture(autouse=True)
def looks_that_end_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn has ended with its looks and not with its slice, also on a host that stands still."""
    monkeypatch.setattr("kvxfer.control.fences.SLICE_S", 60.0)


class Flag:
    """A fence that counts how often it was asked."""

    def __init__(self) -> None:
        self.up, self.asked = False, 0

    def passed(self) -> bool:
        self.asked += 1
        return self.up


def offer(i: int, tokens: int = 4) -> Offer:
    return Offer(TransferId("t", i), b"d", 1, tokens, BlockTable.of([[1]]), False)


def test_a_turn_asks_few_and_comes_to_each() -> None:
    fences, flags = Fences(60.0), [Flag() for _ in range(1000)]
    for i, flag in enumerate(flags):
        assert fences.hold(offer(i), flag, 0.0)
    for i in (0, 500, 999):
        flags[i].up = True
    found = []
    for _ in range(1000 // LOOKS + 1):
        before = sum(flag.asked for flag in flags)
        found += [o.transfer.prompt for o, _, _ in fences.passed(0.0)]
        assert sum(flag.asked for flag in flags) - before <= LOOKS + 3
    assert sorted(found) == [0, 500, 999] and len(fences) == 997


def test_those_of_one_fence_pass_together_and_in_order() -> None:
    fences, one, later = Fences(60.0), Flag(), Flag()
    for i in range(100):
        assert fences.hold(offer(i), one, 0.0)
        assert fences.hold(offer(i, 8), None, 0.0)
    assert fences.hold(offer(0, 12), later, 0.0)
    assert list(fences.passed(0.0)) == []
    one.up = True
    found = []
    while len(fences) > 1:
        found += [(o.transfer.prompt, o.tokens) for o, _, _ in fences.passed(0.0)]
    assert sorted(found) == [(i, tokens) for i in range(100) for tokens in (4, 8)]
    assert all(found.index((i, 4)) < found.index((i, 8)) for i in range(100))
    assert fences.besides(lambda transfer: False) == 1 and fences.besides(lambda transfer: True) == 0
    fences.forget(TransferId("t", 0), 1)
    assert not fences and list(fences.passed(0.0)) == []


def test_a_fence_that_does_not_pass_within_a_lease_has_failed() -> None:
    fences, dead, slow = Fences(60.0), Flag(), Flag()
    assert fences.hold(offer(0), dead, 1000.0)
    assert fences.hold(offer(1), slow, 1000.0)
    fences.renew(TransferId("t", 1), 1050.0)
    fences.renew(TransferId("t", 2), 1050.0)
    assert list(fences.passed(1059.0)) == []
    ((late, called, error),) = fences.passed(1061.0)
    assert (late.transfer.prompt, called) == (0, 1000.0) and error is not None and "60 s" in error
    slow.up = True
    assert [(o.transfer.prompt, error) for o, _, error in fences.passed(1109.0)] == [(1, None)] and not fences
    assert fences.hold(offer(2), Flag(), 1000.0)
    assert [error is None for _, _, error in fences.passed(1061.0)] == [False], "nothing was held when it was renewed"


def test_no_turn_is_taken_for_what_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the interpreter of an engine that is busy with what the fence waits for."""
    fences = Fences(60.0)
    for i in range(LOOKS + 1):
        assert fences.hold(offer(i), Flag(), 1000.0)
    assert list(fences.passed(1000.0)) == []
    assert fences.due(lambda transfer: False) == math.inf
    assert fences.due(lambda transfer: transfer.prompt == 1) == 0.0
    monkeypatch.setattr("kvxfer.control.fences.SLICE_S", 0.0)
    assert list(fences.passed(1000.0)) == []
    assert fences.due(lambda transfer: False) == 0.0, "a turn ended before its looks did"
