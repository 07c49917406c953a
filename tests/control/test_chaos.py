"""The chaos benchmark: two producers and two consumers of one and two ranks hold under kills, stops and preemptions."""

from __future__ import annotations

import json
import random
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from kvxfer.cli.bench import bench
from kvxfer.errors import KvxferError
from kvxfer_bench import world
from kvxfer_bench.chaos import measure


@pytest.mark.slow
def test_nothing_is_wrong_late_or_lost_in_a_short_run() -> None:
    said: list[str] = []
    settings = {"backend": "tcp", "integrity": "full", "staging_bytes": 4 << 20}
    found = measure(8.0, 1.0, 5, settings, say=said.append)
    assert found["complaints"] == []
    assert found["outcomes"]["delivered"] > 0 and sum(found["faults"].values()) >= 2
    assert said == ["0 of 8 s: 0 delivered, 0 faults, 0 complaints", "waiting until everything has ended"], (
        "how far it is"
    )


def test_an_engine_that_does_not_start_in_time_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"backend": "tcp", "staging_bytes": 4 << 20}
    engines = world.RankedWorld({"producer": 1}, 16, random.Random(0), settings, "cpu", lambda name, result: None)
    with closing(engines):
        assert engines.runs("producer")
        engines.kill("producer")
        assert not engines.runs("producer")
        monkeypatch.setattr(world, "START_S", 0.0)
        engines.start("producer")
        assert not engines.runs("producer")
        with pytest.raises(KvxferError, match="the producer did not start within 0 s"):
            engines.turn()


class Played:
    """An engine that starts, and answers no step, or all of them."""

    def __init__(self, name: str, *_: Any, answers: bool) -> None:
        self._asked: list[str] = []
        self._answers = answers

    def send(self, method: str, *_: Any) -> None:
        self._asked.append(method)

    def ready(self, timeout: float) -> bool:
        return bool(self._asked) and (self._answers or self._asked[0] != "step")

    def get(self) -> Any:
        return "its source" if self._asked.pop(0) == "source" else ([], [], 0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("answers", [True, False])
def test_an_engine_that_hangs_is_told(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It held no blocks when it answered last, and so had passed for at rest."""
    monkeypatch.setattr(world, "Remote", partial(Played, answers=answers))
    monkeypatch.setattr(world, "REST_S", 0.4)
    with closing(world.RankedWorld({"producer": 1}, 16, random.Random(0), {}, "cpu", lambda *_: None)) as engines:
        engines.rest()
        assert engines.complaints == (
            [] if answers else ["producer: it does not answer 0.4 s after the last transfer began"]
        )


def test_a_run_that_delivers_nothing_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """No promise is broken where every load fails in time; nothing is proved then, either."""
    monkeypatch.setattr(world, "Remote", partial(Played, answers=True))
    done = CliRunner().invoke(bench, ["chaos", "--minutes", "0.1", "--every", "1000", "--json"])
    assert json.loads(done.stdout)["complaints"] == ["nothing was delivered"]
    assert done.exit_code == 1
