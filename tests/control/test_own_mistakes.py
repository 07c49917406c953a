"""A step that fails by our own mistake: the log says which, others go on, and an illegal event fails the test that it happens in."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer.identity import TransferId
from kvxfer.protocol.consumer import ConsumerMachine
from kvxfer.protocol.transitions import IllegalTransition
from tests.control.conftest import Ended, fetch, offered, until

T = TransferId("own/1/x", 0)


def test_an_illegal_event_is_seen_by_the_test_that_it_happens_in(
    engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, illegal_transitions: list[str]
) -> None:
    p, d = engine({}, seed=1), engine({})
    takes = ConsumerMachine.message

    def mistake(self: ConsumerMachine, *args: Any) -> Any:
        monkeypatch.setattr(ConsumerMachine, "message", takes)
        raise IllegalTransition("played")

    monkeypatch.setattr(ConsumerMachine, "message", mistake)
    p.agents[0].offer(offered([3, 1, 7], 11, transfer=T))
    d.agents[0].fetch(fetch(p.source, [5, 2, 9], 11, transfer=T, handle="a"))
    until(lambda: bool(illegal_transitions))
    assert illegal_transitions == ["played"]
    illegal_transitions.clear()
    until(lambda: "'message' from 127.0.0.1 could not be handled" in caplog.text)  # which hears of it after the fixture

    other = TransferId("own/1/y", 0)
    p.agents[0].offer(offered([2], 4, transfer=other))
    d.agents[0].fetch(fetch(p.source, [8], 4, transfer=other, handle="b"))
    until(lambda: any(e.outcome.delivered for e in d.wait(Ended) if e.handle == "b"))
