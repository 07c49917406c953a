"""Leases of what waits are renewed without steps, and not for ever."""

from __future__ import annotations

import threading
import time

import pytest

from kvxfer import clock
from kvxfer.engine import renewals
from kvxfer.engine.renewals import Renewals
from kvxfer.identity import Source, TransferId
from kvxfer.protocol.messages import Renew
from kvxfer.schedule import FetchSchedule
from kvxfer.testing.clock import SetForward
from kvxfer.values import Group
from tests.schedule.ends import Loading

A, B = Source("127.0.0.1", 7, 1), Source("127.0.0.1", 8, 1)
X, Y = TransferId("own/1/x", 0), TransferId("own/1/y", 0)


class Told:
    def __init__(self) -> None:
        self.notices: list[tuple[Source, TransferId]] = []
        self._change = threading.Condition()

    def __call__(self, source: Source, notice: Renew) -> None:
        assert notice.epoch == source.epoch
        with self._change:
            self.notices += [(source, named.transfer) for named in notice.transfers]
            self._change.notify_all()

    def wait(self, source: Source, transfer: TransferId, count: int) -> None:
        with self._change:
            assert self._change.wait_for(lambda: self.notices.count((source, transfer)) >= count, 30.0), self.notices


class Waiting:
    """Loads that wait, and what renews their leases."""

    def __init__(self, lease: float, told: Told) -> None:
        self.schedule = Loading(FetchSchedule([Group(16)]))
        self.renewals = Renewals(lease, told, lambda: self.schedule.schedule)

    def begin(self, request: str, transfer: TransferId, digest: bytes, source: Source) -> None:
        assert self.schedule.arrive(request, transfer, digest, source, 40)
        load = self.schedule.of(request)
        assert load is not None
        load.came_at = clock.now()
        self.renewals.start()


def test_nothing_but_time_has_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewals, "RENEWED", 2000)  # of leases this short
    told = Told()
    r = Waiting(0.04, told)
    r.begin("x", X, b"x", A)
    r.begin("y", Y, b"y", B)
    told.wait(A, X, 3)
    told.wait(B, Y, 3)
    r.schedule.finish("x")
    before = told.notices.count((A, X))
    told.wait(B, Y, told.notices.count((B, Y)) + 3)
    assert told.notices.count((A, X)) <= before + 1
    r.renewals.close()
    r.renewals.close()
    count = len(told.notices)
    r.begin("z", X, b"x", A)
    time.sleep(0.05)
    assert len(told.notices) == count


def test_renewals_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewals, "RENEWED", 2000)
    told, time_passes = Told(), SetForward()
    with time_passes.installed():
        r = Waiting(0.04, told)
        r.begin("x", X, b"x", A)
        told.wait(A, X, 1)
        time_passes.forward(40.0)
        told.wait(A, X, told.notices.count((A, X)) + 2)
        time_passes.forward(40.0)
        r.begin("y", Y, b"y", A)
        told.wait(A, Y, 2)
        count = told.notices.count((A, X))
        told.wait(A, Y, 5)
        assert told.notices.count((A, X)) == count, "it was renewed for longer than 2000 leases"
        r.renewals.close()
