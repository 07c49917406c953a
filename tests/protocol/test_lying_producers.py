"""A producer that announces more than was asked for costs its consumer no more than that: each announcement is planned and moved."""

from __future__ import annotations

import pytest

from kvxfer.failures import FailureKind
from kvxfer.protocol import messages as m
from kvxfer.protocol.values import Emit, Ended
from kvxfer.values import BlockTable
from tests.protocol.test_deadlines import Asker
from tests.protocol.test_doors import T

LIES = {
    "tokens twice": [(0, 8, False), (4, 12, False)],
    "tokens again and again": [(0, 4, False)] * 3,
    "no tokens": [(4, 4, False)],
    "tokens that nobody wants": [(12, 16, False)],
    "two last parts": [(8, 12, True), (12, 12, True)],
    "more than is wanted with the last part": [(0, 8, False), (8, 16, True)],
    "a last part behind all that is wanted": [(0, 12, False), (16, 16, True)],
    "less than is wanted with the last part": [(0, 4, False), (4, 8, True)],
    "a last part that ends before it begins": [(0, 8, False), (12, 8, True)],
    "some tokens twice and others never": [(0, 4, False), (0, 4, False), (8, 12, False)],
    "some tokens twice, others never, and the last part before": [(12, 12, True), (0, 8, False), (4, 8, False)],
}
"""The parts that are announced, of which only the last one is wrong, of a fetch of 12 tokens in blocks of 4."""


@pytest.mark.parametrize("lie", LIES)
def test_what_is_announced_wrongly_ends_the_fetch(lie: str) -> None:
    asker = Asker()
    for number, (lo, hi, final) in enumerate(LIES[lie]):
        table = BlockTable.of([range(lo // 4, -(-hi // 4))])
        ready = m.PartReady(T, asker.asked.attempt, 1, number, lo, hi, final, table, number, 0)
        actions = asker.machine.message("link", ready, 1.0)
        ends = [a.event for a in actions if isinstance(a, Emit) and isinstance(a.event, Ended)]
        assert len(ends) == (number == len(LIES[lie]) - 1), (number, actions)
    assert ends[0].outcome.kind is FailureKind.MISUSE


def test_the_last_part_may_be_announced_first_and_hold_nothing() -> None:
    asker = Asker()
    for number, (lo, hi, final) in enumerate([(12, 12, True), (4, 12, False), (0, 4, False)]):
        table = BlockTable.of([[] if lo == hi else range(lo // 4, hi // 4)])
        ready = m.PartReady(T, asker.asked.attempt, 1, number, lo, hi, final, table, number, 0)
        actions = asker.machine.message("link", ready, 1.0)
        assert not any(isinstance(a, Emit) for a in actions), actions
