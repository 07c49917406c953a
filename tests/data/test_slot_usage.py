"""How long a link may hold a slot for which others wait, by what it has done before."""

from __future__ import annotations

from kvxfer.data.slot_usage import LOSS_FACTOR, SlotUsage
from kvxfer.protocol.peer import PeerIdentity
from kvxfer.protocol.values import LinkId
from kvxfer.testing.clock import PlayedClock

NEW: LinkId = b"new"
LOST: LinkId = b"lost"
CALM, FIRST = 60.0, 0.5


def test_who_has_lost_a_slot_has_more_time_than_who_is_new() -> None:
    """Else one whose host is slow would lose each slot that it gets, and never take a piece."""
    clock, usage = PlayedClock(), SlotUsage()
    with clock.installed():
        assert usage.patience(NEW, CALM, FIRST) == CALM, "while none has lost a slot"
        for losses in (1, 2):
            usage.lose(LOST)
            assert usage.patience(LOST, CALM, FIRST) == (1 + losses * LOSS_FACTOR) * FIRST
            assert usage.patience(NEW, CALM, FIRST) == FIRST
        for _ in range(10):
            usage.lose(LOST)
        assert usage.patience(LOST, CALM, FIRST) == CALM / 2


def test_who_takes_pieces_at_once_has_earned_time() -> None:
    clock, usage = PlayedClock(), SlotUsage()
    with clock.installed():
        usage.lose(LOST)
        usage.know(NEW, PeerIdentity("127.0.0.1"))
        for taken in (1, 2, 3):
            usage.held(NEW, 0.1)
            assert usage.patience(NEW, CALM, FIRST) == (1 + taken) * FIRST
        usage.held(NEW, 0.5)
        assert usage.patience(NEW, CALM, FIRST) == 4 * FIRST, "in time is not at once"
