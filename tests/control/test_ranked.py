"""The engine of ``kvxfer bench chaos`` and ``soak`` notices loads that do not end exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvxfer.failures import Failure, FailureKind, Outcome
from kvxfer.identity import Source
from kvxfer.protocol.values import Ended, Event, Released
from kvxfer.values import Fetch
from kvxfer_bench import ranked


def ended(fetch: Fetch) -> Ended:
    outcome = Outcome(Failure(FailureKind.CANCELLED, "it was played"))
    return Ended("consumer", fetch.transfer, fetch.handle, outcome, 0, 0.01)


def released(fetch: Fetch) -> Released:
    return Released("consumer", fetch.transfer, fetch.handle)


@pytest.mark.parametrize(
    ("says", "wrong"),
    [
        ([ended, released], None),
        ([ended, ended, released], "transfer 7 ended on rank 0 twice"),
        ([released], "rank 0 released transfer 7, which had no outcome"),
    ],
)
def test_a_load_ends_exactly_once(
    says: Sequence[Callable[[Fetch], Event]], wrong: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Played:
        epoch, descriptor = 1, None

        def __init__(self, *_: Any) -> None:
            self._events: list[Event] = []

        def fetch(self, fetch: Fetch) -> None:
            self._events = [event(fetch) for event in says]

        def events(self) -> list[Event]:
            events, self._events = self._events, []
            return events

    class Directory:
        source = Source("127.0.0.1", 1, 1)

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def publish(self, _: Any) -> None: ...

    monkeypatch.setattr(ranked, "Agent", Played)
    monkeypatch.setattr(ranked, "Directory", Directory)
    engine = ranked.RankedEngine("consumer", 1, 16, 0, {"backend": "tcp"}, ["cpu"])
    results, complaints, holding = engine.step([], [(7, Directory.source, False)], 2 * ranked.LAG_S)
    assert not holding
    assert len(results) == (ended in says)
    assert (complaints == []) if wrong is None else (len(complaints) == 1 and wrong in complaints[0])
