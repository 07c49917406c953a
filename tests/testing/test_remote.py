"""Objects in processes of their own, which benchmarks and tests call."""

from __future__ import annotations

import time

import pytest

from kvxfer.testing.remote import Remote


class Sleeper:
    def sleep(self) -> None:
        time.sleep(600)

    def close(self) -> None:
        pass


def test_an_interrupt_does_not_wait_for_the_call_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remote, "close", lambda self: pytest.fail("it waits"))
    with pytest.raises(KeyboardInterrupt), Remote("sleeper", Sleeper) as sleeper:
        sleeper.wait()
        sleeper.send("sleep")
        raise KeyboardInterrupt
    assert sleeper.process.exitcode == -9


def test_otherwise_the_object_is_closed() -> None:
    with Remote("sleeper", Sleeper) as sleeper:
        sleeper.wait()
    assert sleeper.process.exitcode == 0
